"""Dense replicas, and the rounds that keep them together: for trainers and for groups."""
