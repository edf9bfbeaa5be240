"""The form of a model that group servers compute: its layers in pieces, its forward pass, and what watches it."""
