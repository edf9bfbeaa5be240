"""Parts of a model that servers compute: their operators, how they train, and their messages."""
