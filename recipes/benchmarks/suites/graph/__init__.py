"""Suite ``graph``."""
