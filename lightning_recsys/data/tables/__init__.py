"""What anybody's tables mean: schemas, and how their files are written."""
