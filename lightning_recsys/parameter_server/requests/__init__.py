"""What a server does with each kind of request: every module here checks some operations and carries them out."""
