"""Package cm.dra."""
