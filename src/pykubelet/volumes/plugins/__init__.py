"""Package volumes.plugins."""
