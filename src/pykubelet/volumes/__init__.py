"""Volumes of a pod: there before its containers start, gone after they end."""
