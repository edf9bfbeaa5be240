"""Pieces of a layer over processes: which part of a parameter each has, and what of the results they exchange."""
