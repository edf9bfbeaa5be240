"""What is measured, one file or folder a suite."""
