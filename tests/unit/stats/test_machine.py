"""Facts about the host, as metrics and `/spec/` report them."""

import asyncio
import os
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from pykubelet.stats.machine import FACTS_MAX_AGE_SECONDS, MachineFactsCache, machine_info, read_machine_facts
from pykubelet.stats.samples import MachineFacts
from pykubelet.stats.storage.filesystems import Filesystems
from pykubelet.util.tasks import TaskScope


def test_read_machine_facts_this_host_complete() -> None:
    facts = read_machine_facts()
    assert facts.kernel_version == os.uname().release
    assert facts.cores >= facts.physical_cores >= 1
    assert facts.sockets >= 1
    assert facts.memory > 0
    assert facts.boot_id == Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    assert (facts.books, facts.nvm_memory_mode) == (0, 0)


def test_read_machine_facts_files_of_flags_used(tmp_path: Path) -> None:
    (tmp_path / "mine").write_text("m1\n")
    facts = read_machine_facts("/absent,/mine", "/mine", tmp_path)
    expected = MachineFacts(
        machine_id="m1", boot_id="m1", kernel_version=os.uname().release, os_version="Unknown"
    )
    assert facts == expected


async def test_machine_info_contains_measured_filesystems(tasks: TaskScope) -> None:
    filesystems = Filesystems(Path("/var/lib/kubelet"), tasks)
    info = await machine_info(filesystems)
    sizes = os.statvfs("/")
    found = {fs.device: fs for fs in info.filesystems}
    assert sizes.f_blocks * sizes.f_frsize in [fs.capacity for fs in info.filesystems]
    assert list(found) == [usage.device for usage in filesystems.all()]
    assert {fs.type for fs in info.filesystems} == {"vfs"}
    assert b'"nvm":{"memory_mode_capacity":0,"app direct_mode_capacity":0' in msgspec.json.encode(info)


@pytest.mark.looptime
async def test_machine_facts_cache_changed_host_read_again_after_five_minutes(
    tmp_path: Path, tasks: TaskScope, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def immediately(work: Callable[[], object]) -> object:
        return work()

    # The loop's time would pass while a thread works.
    monkeypatch.setattr(asyncio, "to_thread", immediately)
    (tmp_path / "proc").mkdir()
    (tmp_path / "mine").write_text("m1\n")

    async def memory_after(seconds: float, kibibytes: int) -> int:
        (tmp_path / "proc/meminfo").write_text(f"MemTotal: {kibibytes} kB\n")
        await asyncio.sleep(seconds)
        cache.latest()
        await asyncio.sleep(1)
        return cache.latest().memory // 1024

    (tmp_path / "proc/meminfo").write_text("MemTotal: 1 kB\n")
    cache = MachineFactsCache(tasks, "/mine", "/mine", tmp_path)
    assert (cache.latest().machine_id, cache.latest().memory) == ("m1", 1024)
    await asyncio.sleep(1)
    assert await memory_after(FACTS_MAX_AGE_SECONDS - 10, 2) == 1
    assert await memory_after(20, 3) == 3
