"""Helpers without knowledge of Kubernetes: tasks, back-off, rate limits, metrics."""
