"""Stores of embedding rows and dense vectors, and the servers that offer them to other machines."""
