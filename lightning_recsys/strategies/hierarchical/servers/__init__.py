"""Group servers of Hierarchical Training: their program, their parts of the model, and rounds with other groups."""
