"""Fixtures of tests/support/csi.py."""

from tests.support.csi import base, make_driver, rig

__all__ = ["base", "make_driver", "rig"]
