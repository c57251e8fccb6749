"""Package podsync."""
