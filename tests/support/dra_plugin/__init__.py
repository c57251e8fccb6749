"""A driver of resource claims for tests: a process of its own, with devices that are only names."""
