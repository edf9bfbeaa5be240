"""A first schema for an unknown file, and the evidence behind it."""
