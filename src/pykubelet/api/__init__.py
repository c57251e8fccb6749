"""Kubernetes' value types and objects as typed structs; touches nothing outside the process."""
