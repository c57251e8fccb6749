"""A device plugin for tests: a process of its own, with devices that are /dev/null by other names."""
