"""Several things at once, and no leaving before all of them have ended."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Sequence
from typing import Any, TypeVar

T = TypeVar("T")


async def side_by_side(work: Sequence[Coroutine[Any, Any, T]]) -> list[T]:
    """Run coroutines at once and give their results in order; when cancelled, all are, and are waited for.

    They are expected not to raise: whatever one does raise comes in an ExceptionGroup.
    """
    if len(work) == 1:
        return [await work[0]]
    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(part) for part in work]
    return [task.result() for task in tasks]
