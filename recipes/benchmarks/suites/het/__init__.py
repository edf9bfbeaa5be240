"""Suite ``het``."""
