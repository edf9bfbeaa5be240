"""Plans of operators: to make, to write down and read, to draw."""
