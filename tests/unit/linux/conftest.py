"""Fixtures of tests/support/api_client.py."""

from tests.support.api_client import scripts

__all__ = ["scripts"]
