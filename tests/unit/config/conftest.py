"""Fixtures of tests/support/api_client.py."""

from tests.support.api_client import authority, node_pair, server, server_pair

__all__ = ["authority", "node_pair", "server", "server_pair"]
