"""Suite ``single``: one process."""
