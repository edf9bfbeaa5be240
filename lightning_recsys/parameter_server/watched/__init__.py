"""What a server counts of its requests, and how that is told to Prometheus."""
