"""Package pluginmanager."""
