"""Fixtures of tests/support/api_client.py."""

from tests.support.api_client import access, authority, client, opened, server, server_pair

__all__ = ["access", "authority", "client", "opened", "server", "server_pair"]
