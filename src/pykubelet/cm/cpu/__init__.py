"""Package cm.cpu."""
