"""Fixtures of tests/support/volumes.py."""

from tests.support.volumes import root, shelf, volumes

__all__ = ["root", "shelf", "volumes"]
