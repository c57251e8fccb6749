"""Package cm.cgroups."""
