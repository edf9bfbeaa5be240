"""The rows of a version: files, packed forms, and sums over them."""
