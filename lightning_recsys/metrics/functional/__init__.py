"""metrics/functional."""
