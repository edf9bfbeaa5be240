"""What the strategies share: how their workers start, find their servers, save, and end."""
