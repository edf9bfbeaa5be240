"""The operations of a server: every module here checks some kinds of request and carries them out."""
