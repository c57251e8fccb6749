"""Fixtures of tests/support/cri.py."""

from tests.support.cri import folder, metrics, registry

__all__ = ["folder", "metrics", "registry"]
