"""What ``recipes/benchmark.py`` measures, in three rooms: see README.md."""
