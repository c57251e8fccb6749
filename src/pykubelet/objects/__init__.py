"""Package objects."""
