"""Fixtures of the statistics: a scripted runtime and its client, and a scope of tasks."""

from collections.abc import AsyncIterator

import pytest

from pykubelet.util.tasks import TaskScope
from tests.support.cri import cri, folder, metrics, registry, scripted

__all__ = ["cri", "folder", "metrics", "registry", "scripted"]


@pytest.fixture
async def tasks() -> AsyncIterator[TaskScope]:
    async with TaskScope() as scope:
        yield scope
