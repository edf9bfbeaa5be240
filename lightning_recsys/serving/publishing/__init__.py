"""Writing versions of a model while it is trained: who may, what changed, in which order, and which versions stay."""
