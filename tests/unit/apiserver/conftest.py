"""Fixtures of tests/support/api_client.py."""

from tests.support.api_client import (
    access,
    authority,
    client,
    node_pair,
    opened,
    scripts,
    server,
    server_pair,
)

__all__ = ["access", "authority", "client", "node_pair", "opened", "scripts", "server", "server_pair"]
