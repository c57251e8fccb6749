"""Fixtures of tests/support/images.py."""

from tests.support.images import journal, metrics, registry, scope

__all__ = ["journal", "metrics", "registry", "scope"]
