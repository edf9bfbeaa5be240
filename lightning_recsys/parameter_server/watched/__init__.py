"""The counts that a server keeps of its requests, and how they are told to Prometheus."""
