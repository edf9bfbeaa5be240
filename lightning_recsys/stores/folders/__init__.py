"""The folders that stores' files lie in, and their room."""
