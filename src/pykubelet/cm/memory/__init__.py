"""Package cm.memory."""
