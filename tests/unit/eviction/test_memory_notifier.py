"""The kernel's notification of memory usage, with files in place of a cgroup."""

import asyncio
import os
from pathlib import Path

from pykubelet.eviction.memory_notifier import MemoryNotifier
from pykubelet.eviction.observations import NodeMeasurements
from pykubelet.linux.cgroupfs import CgroupMode, Cgroups
from tests.support.eviction import cgroup, threshold

POLICY = threshold("allocatableMemory.available", "32Mi")


async def test_update_watch_closed_while_file_was_inaccessible_watches_again(tmp_path: Path) -> None:
    (tmp_path / "pods").mkdir()
    usage = tmp_path / "pods" / "memory.usage_in_bytes"
    usage.write_text("0")
    calls = list[None]()
    cgroups = Cgroups(CgroupMode.V1, tmp_path, {"memory": tmp_path}, {})
    notifier = MemoryNotifier(cgroups, "/pods", lambda: calls.append(None))
    measured = NodeMeasurements(pods=cgroup("64Mi", "64Mi", inactive_file="0"))
    try:
        notifier.update([POLICY], measured)
        (watch,) = notifier._watches.values()
        usage.rename(tmp_path / "hidden")
        os.eventfd_write(watch.file, 1)
        async with asyncio.timeout(20):
            while not watch.is_closed:
                await asyncio.sleep(0)
        (tmp_path / "hidden").rename(usage)
        notifier.update([POLICY], measured)
        (watch,) = notifier._watches.values()
        assert not watch.is_closed
        os.eventfd_write(watch.file, 1)
        async with asyncio.timeout(20):
            while not calls:
                await asyncio.sleep(0)
    finally:
        notifier.close()
