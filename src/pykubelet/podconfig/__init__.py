"""Desired pods: where they come from, how they are completed and checked, and what changed."""
