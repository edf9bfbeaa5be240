"""Suite ``des``."""
