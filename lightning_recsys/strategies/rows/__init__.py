"""Where the embedding rows of a run live: one of the three parts of a strategy."""
