"""What we are held against, one file a peer."""
