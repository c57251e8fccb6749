"""Fixtures of tests/support/cri.py."""

from tests.support.cri import cri, folder, metrics, records, registry, scripted

__all__ = ["cri", "folder", "metrics", "records", "registry", "scripted"]
