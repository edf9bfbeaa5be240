"""Suite ``hierarchical``."""
