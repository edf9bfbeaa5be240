"""Virtual clusters: beside real ones, and how fast they are."""
