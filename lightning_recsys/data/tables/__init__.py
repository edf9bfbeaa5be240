"""Tables of one's own: schemas, and how their files are written."""
