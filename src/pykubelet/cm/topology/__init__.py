"""Package cm.topology."""
