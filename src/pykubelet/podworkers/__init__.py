"""The loop that drives everything, and its health."""
