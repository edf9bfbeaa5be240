"""Suite ``data``: readers, and the preparation of raw rows."""
