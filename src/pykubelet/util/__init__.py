"""Package util."""
