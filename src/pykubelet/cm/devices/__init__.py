"""Package cm.devices."""
