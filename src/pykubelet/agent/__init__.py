"""Package agent."""
