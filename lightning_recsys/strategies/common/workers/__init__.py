"""How the workers of a run find each other, meet, and deal the data out among those that live."""
