"""What every suite measures with."""
