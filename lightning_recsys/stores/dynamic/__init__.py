"""Rows that are made when they are first trained, and may be forgotten again."""
