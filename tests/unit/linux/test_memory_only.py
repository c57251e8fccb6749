"""Whether tmpfs can be kept from the disk, and who is told when it cannot."""

import errno
import os
from pathlib import Path

import pytest

import pykubelet.linux.kernel
from pykubelet.agent.host_setup import warn_of_swap
from pykubelet.linux.kernel import SwapArea, supports_noswap
from pykubelet.linux.mounts import mounts_below, read_mounts

AREA = SwapArea("/dev/zram0", "partition", 4, 0, 100)


@pytest.mark.machine
def test_supports_noswap_on_host_true_and_cleans_up(tmp_path: Path) -> None:
    major, minor = (int(part) for part in os.uname().release.split(".")[:2])
    if (major, minor) < (6, 4):
        pytest.skip("the kernel may or may not know it")
    assert supports_noswap(tmp_path)
    assert list(tmp_path.iterdir()) == []
    assert not mounts_below(read_mounts(), tmp_path)


@pytest.mark.parametrize(
    ("areas", "error", "told"), [([], errno.EINVAL, []), ([AREA], 0, []), ([AREA], errno.EINVAL, ["Warning"])]
)
async def test_warn_of_swap_noswap_unsupported_with_swap_records_event(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, areas: list[SwapArea], error: int, told: list[str]
) -> None:
    def mount(source: str, point: Path, kind: str, options: str) -> None:
        assert (source, kind, options) == ("tmpfs", "tmpfs", "noswap")
        if error:
            raise OSError(error, os.strerror(error))

    monkeypatch.setattr(pykubelet.linux.kernel, "mount", mount)
    monkeypatch.setattr(pykubelet.linux.kernel, "unmount", lambda point, detach: True)
    monkeypatch.setattr(pykubelet.linux.kernel, "swap_areas", lambda: areas)
    events: list[tuple[str, str, str]] = []
    await warn_of_swap(tmp_path, lambda *event: events.append(event))
    assert [kind for kind, _, _ in events] == told
    assert {reason for _, reason, _ in events} <= {"PossibleMemoryBackedVolumesOnDisk"}
    assert list(tmp_path.iterdir()) == []
