"""Suite ``plan``."""
