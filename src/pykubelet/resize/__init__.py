"""Package resize."""
