"""A scope for a server's own tasks that does not change the errors of what runs inside."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from pykubelet.tasks import TaskScope


@asynccontextmanager
async def own_scope() -> AsyncIterator[TaskScope]:
    """Give a TaskScope; an error comes out as it is, not wrapped into a group of one."""
    try:
        async with TaskScope() as scope:
            yield scope
    except BaseExceptionGroup as group:
        if len(group.exceptions) > 1:
            raise
        raise group.exceptions[0] from None
