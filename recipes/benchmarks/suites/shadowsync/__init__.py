"""Suite ``shadowsync``."""
