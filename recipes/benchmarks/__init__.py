"""What ``recipes/benchmark.py`` measures, one suite per file."""
