"""A run of a strategy: its identity, its servers, its checkpoints, and what it changes of Lightning."""
