"""What stores ask about the folders that their files lie in."""
