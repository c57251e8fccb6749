"""Fixtures of the statistics: a scripted runtime and its client."""

from tests.support.cri import cri, folder, metrics, registry, scripted

__all__ = ["cri", "folder", "metrics", "registry", "scripted"]
