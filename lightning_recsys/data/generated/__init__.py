"""Generated clicks whose best score is known."""
