"""Publishing while training goes on, and answering requests."""
