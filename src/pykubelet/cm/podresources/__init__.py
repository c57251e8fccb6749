"""Package cm.podresources."""
