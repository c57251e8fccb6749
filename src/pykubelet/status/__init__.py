"""Package status."""
