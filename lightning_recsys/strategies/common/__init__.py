"""The common ground of the strategies: how their workers start, find their servers, save, and end."""
