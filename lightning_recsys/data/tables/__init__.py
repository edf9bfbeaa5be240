"""Anybody's tables: schemas, reading, encoding, and the data module that holds their rows in memory."""
