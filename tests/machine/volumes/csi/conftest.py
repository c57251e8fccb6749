"""Fixtures of tests/support/csi.py."""

from tests.support.csi import alone, base, make_driver, rig

__all__ = ["alone", "base", "make_driver", "rig"]
