"""Pods terminate without their CSI driver; the pending unpublish is completed when it comes back."""

import asyncio
import errno
import os
import stat
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from pykubelet.linux.mounts import mount, read_mounts, unmount
from pykubelet.pluginmanager.registration import Plugin
from pykubelet.volumes.csi import pending_unpublish as patience
from pykubelet.volumes.csi import unpublish as letting_go
from pykubelet.volumes.csi.drivers import CsiNodePublisher, Drivers
from pykubelet.volumes.csi.names import unique_name
from pykubelet.volumes.csi.pending_unpublish import (
    ABSENT_SECONDS,
    DIRECTORY,
    FAILING_SECONDS,
    PendingUnpublish,
    PendingUnpublishStore,
    UnpublishDeadlines,
)
from pykubelet.volumes.csi.plugin import CsiPlugin
from pykubelet.volumes.csi.unpublish import UnpublishRetrier
from pykubelet.volumes.errors import VolumePluginError
from pykubelet.volumes.operations import Locks
from pykubelet.volumes.plugin import VolumeToMount
from tests.support.csi import Rig, inline, make_pod, needs_root, persistent
from tests.support.csi_driver.backend import is_mounted
from tests.support.csi_driver.process import DRIVER, DriverProcess
from tests.support.dying import dies_at

machine = pytest.mark.machine
MakeDriver = Callable[..., DriverProcess]

USED = unique_name(DRIVER, "vol-1")


@pytest.fixture
def hasty(monkeypatch: pytest.MonkeyPatch) -> None:
    """Wait for drivers for a moment only."""
    monkeypatch.setattr(patience, "ABSENT_SECONDS", 0.3)
    monkeypatch.setattr(patience, "FAILING_SECONDS", 2.0)


async def left(kind: CsiPlugin, uid: str = "u-1", name: str = "pv-vol-1") -> int:
    """Take a pod's volume down, as its worker does: again and again; gives how often that failed."""
    for failures in range(400):
        try:
            await kind.tear_down(uid, name)
        except (VolumePluginError, OSError):
            await asyncio.sleep(0.05)
        else:
            return failures
    raise AssertionError("the pod cannot leave")


async def given(rig: Rig, kind: CsiPlugin, wanted: VolumeToMount) -> Path:
    """Have a volume that the cluster attaches."""
    rig.attach("vol-1")
    rig.pods[wanted.uid] = wanted.pod
    mounted = await kind.set_up(wanted)
    return Path(mounted.path or mounted.device)


async def swept(rig: Rig, kind: CsiPlugin) -> None:
    """Sweep until all is unstaged: a driver that comes back is not registered for a moment."""
    deadline = asyncio.get_running_loop().time() + 30
    while list(rig.root.glob("plugins/kubernetes.io/csi/*/*")):
        assert asyncio.get_running_loop().time() < deadline, "volumes stay staged"
        await kind.unmount_unused(())
        await asyncio.sleep(0.02)


def debts(rig: Rig) -> list[Path]:
    return sorted((rig.root / DIRECTORY).glob("*"))


@machine
@needs_root
@pytest.mark.usefixtures("hasty")
@pytest.mark.parametrize("block", [False, True], ids=["files", "device"])
@pytest.mark.parametrize("dead", [False, True], ids=["left", "dead"])
async def test_csi_tear_down_driver_gone_unmounts_and_unpublishes_later(
    rig: Rig, make_driver: MakeDriver, dead: bool, block: bool
) -> None:
    driver = make_driver()
    rig.driver_object(attachRequired=True)
    wanted = persistent(make_pod(), block=block, fsType="" if block else "ext4")
    async with rig.running() as kind:
        await rig.registered()
        place = await given(rig, kind, wanted)
        if dead:
            driver.kill()
        else:
            driver.stop()
            await rig.until("gone", lambda: not kind.drivers.names)
        assert await left(kind) > 0, "it is waited for"
        assert not os.path.lexists(place)
        pods = rig.root / "pods"
        assert not read_mounts(pods)
        assert [path for path in pods.rglob("*") if not path.is_dir()] == []
        (file,) = debts(rig)
        assert stat.S_IMODE(file.stat().st_mode) == 0o600
        assert stat.S_IMODE(file.parent.stat().st_mode) == 0o700
        ((name, reason, text),) = rig.events[-1:]
        assert (name, reason) == ("pod-u-1", "UnpublishedWithoutDriver")
        assert DRIVER in text
        assert "pv-vol-1" in text
        assert kind.in_use() == {USED}
        await kind.unmount_unused(())
        assert kind.in_use() == {USED}
        asked, sweeps = len(driver.calls("NodeUnpublishVolume")), rig.sweeps
        driver.start()
        await rig.until("paid", lambda: not debts(rig))
        (call,) = driver.calls("NodeUnpublishVolume")[asked:]
        assert call["volume_id"] == "vol-1"
        assert call["target_path"].startswith(str(rig.root))
        assert kind.in_use() == {USED}, "it is staged still"
        await rig.until("a sweep is asked for", lambda: rig.sweeps > sweeps)
        await swept(rig, kind)
        assert driver.names()[-2:] == ["NodeUnpublishVolume", "NodeUnstageVolume"]
        assert kind.in_use() == frozenset()
    assert (rig.left(), driver.loops_left()) == ([], [])


@machine
@needs_root
async def test_csi_tear_down_driver_restarted_in_time_leaves_no_pending_unpublish(
    rig: Rig, make_driver: MakeDriver
) -> None:
    driver = make_driver()
    rig.driver_object(attachRequired=True)
    async with rig.running() as kind:
        await rig.registered()
        await given(rig, kind, persistent(make_pod()))
        driver.kill()
        with pytest.raises(VolumePluginError):
            await kind.tear_down("u-1", "pv-vol-1")
        assert debts(rig) == []
        told = len(driver.calls("NotifyRegistrationStatus"))
        driver.start()
        await rig.until("back", lambda: len(driver.calls("NotifyRegistrationStatus")) > told)
        await kind.tear_down("u-1", "pv-vol-1")
        await kind.unmount_unused(())
    assert rig.left() == []


@machine
@needs_root
@pytest.mark.usefixtures("hasty")
async def test_csi_tear_down_unpublish_fails_unmounts_and_retries_later(
    rig: Rig, make_driver: MakeDriver
) -> None:
    driver = make_driver()
    rig.driver_object(attachRequired=True)
    async with rig.running() as kind:
        await rig.registered()
        await given(rig, kind, persistent(make_pod()))
        driver.behave(fail={"NodeUnpublishVolume": ["FAILED_PRECONDITION", "not now"]})
        assert await left(kind) > 1
        assert not read_mounts(rig.root / "pods")
        assert "not now" in rig.events[-1][2]
        tries = len(driver.calls("NodeUnpublishVolume"))
        await rig.until("asked again", lambda: len(driver.calls("NodeUnpublishVolume")) > tries)
        assert kind.in_use() == {USED}
        driver.behave()
        await rig.until("paid", lambda: not debts(rig))
        await swept(rig, kind)
        assert kind.in_use() == frozenset()
    assert rig.left() == []


@machine
@needs_root
@pytest.mark.usefixtures("hasty")
async def test_csi_pending_unpublish_not_found_is_completed(rig: Rig, make_driver: MakeDriver) -> None:
    driver = make_driver("--no-stage")
    rig.driver_object()
    async with rig.running() as kind:
        await rig.registered()
        await kind.set_up(inline(make_pod()))
        driver.kill()
        await left(kind, name="data")
        assert kind.in_use() == frozenset(), "it is never attached"
        driver.behave(fail={"NodeUnpublishVolume": ["NOT_FOUND", "never heard of it"]})
        driver.start()
        await rig.until("paid", lambda: not debts(rig))
    assert rig.left() == []


@machine
@needs_root
@pytest.mark.usefixtures("hasty")
async def test_csi_tear_down_driver_gone_busy_mount_is_detached(rig: Rig, make_driver: MakeDriver) -> None:
    driver = make_driver()
    rig.driver_object()
    async with rig.running() as kind:
        await rig.registered()
        place = await given(rig, kind, persistent(make_pod(), fsType="ext4"))
        with (place / "file").open("w") as used:
            driver.kill()
            await left(kind)
            assert not read_mounts(rig.root / "pods")
            used.write("still there")
        driver.start()
        await rig.until("paid", lambda: not debts(rig))
        await swept(rig, kind)
    assert (rig.left(), driver.loops_left()) == ([], [])


@machine
@needs_root
@pytest.mark.usefixtures("hasty")
async def test_csi_tear_down_driver_gone_hanging_unmount_is_detached(
    rig: Rig, make_driver: MakeDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    never = threading.Event()

    def hanging(point: Path, *, detach: bool = False) -> bool:
        if not detach:
            never.wait()
        return unmount(point, detach=detach)

    monkeypatch.setattr(letting_go, "unmount", hanging)
    monkeypatch.setattr(letting_go, "UNMOUNT_SECONDS", 0.2)
    driver = make_driver("--no-stage")
    rig.driver_object()
    async with rig.running() as kind:
        await rig.registered()
        await kind.set_up(inline(make_pod()))
        driver.kill()
        await left(kind, name="data")
        assert not read_mounts(rig.root / "pods")
    never.set()


@machine
@needs_root
@pytest.mark.usefixtures("hasty")
async def test_csi_tear_down_driver_gone_unmounted_files_are_preserved(
    rig: Rig, make_driver: MakeDriver
) -> None:
    driver = make_driver("--no-stage")
    rig.driver_object()
    async with rig.running() as kind:
        await rig.registered()
        place = Path((await kind.set_up(inline(make_pod()))).path)
        driver.kill()
        unmount(place)
        (place / "precious").write_text("data")
        await left(kind, name="data")
        assert not place.exists()
        kept, debt = sorted(debts(rig), key=lambda path: path.suffix, reverse=True)
        assert (kept / "precious").read_text() == "data"
        assert debt.suffix == ".json"


@machine
@needs_root
@pytest.mark.usefixtures("hasty")
async def test_csi_tear_down_pending_unpublish_not_writable_stays_mounted(
    rig: Rig, make_driver: MakeDriver
) -> None:
    """The disk is full."""
    driver = make_driver("--no-stage")
    rig.driver_object()
    async with rig.running() as kind:
        await rig.registered()
        place = Path((await kind.set_up(inline(make_pod()))).path)
        driver.kill()
        full = rig.root / DIRECTORY.parent
        full.mkdir()
        mount("tmpfs", full, "tmpfs", "size=4k,nr_inodes=1")
        with pytest.raises(VolumePluginError):
            await kind.tear_down("u-1", "data")
        await asyncio.sleep(0.4)
        with pytest.raises(OSError, match="No space left"):
            await kind.tear_down("u-1", "data")
        assert is_mounted(place)
        unmount(full)
        await kind.tear_down("u-1", "data")
        assert not place.exists()


@machine
@needs_root
@pytest.mark.usefixtures("hasty")
@pytest.mark.parametrize("block", [False, True], ids=["files", "device"])
async def test_csi_set_up_pending_unpublish_is_completed_first(
    rig: Rig, make_driver: MakeDriver, block: bool
) -> None:
    driver = make_driver()
    rig.driver_object(attachRequired=True)
    async with rig.running() as kind:
        await rig.registered()
        await given(rig, kind, persistent(make_pod(), block=block))
        driver.kill()
        await left(kind)
    driver.start()
    after = rig.new_kind()
    # By hand: nobody pays debts beside.
    await after.drivers.register(Plugin("CSIPlugin", DRIVER, driver.socket, ("1.0.0",)))
    driver.behave(fail={"NodeUnpublishVolume": ["INTERNAL", "cannot"]})
    running = asyncio.create_task(after._informer.run())
    try:
        begun = len(driver.names())
        with pytest.raises(VolumePluginError, match=r"must first take back what an earlier pod had.*cannot"):
            await after.set_up(persistent(make_pod("u-2"), block=block))
        assert driver.names()[begun:] == ["NodeUnpublishVolume"]
        driver.behave()
        begun = len(driver.names())
        await after.set_up(persistent(make_pod("u-2"), block=block))
        assert driver.names()[begun:] == ["NodeUnpublishVolume", "NodeStageVolume", "NodePublishVolume"]
        assert debts(rig) == []
        await after.tear_down("u-2", "pv-vol-1")
        await after.unmount_unused(())
    finally:
        running.cancel()
    assert (rig.left(), driver.loops_left()) == ([], [])


@machine
@needs_root
@pytest.mark.usefixtures("hasty")
@pytest.mark.parametrize("block", [False, True], ids=["files", "device"])
def test_csi_tear_down_kubelet_killed_at_any_step_unpublishes_later(
    rig: Rig, make_driver: MakeDriver, monkeypatch: pytest.MonkeyPatch, block: bool
) -> None:
    """The next agent ends it, without the driver or with it; the driver is asked in any case."""
    monkeypatch.setattr(patience, "ABSENT_SECONDS", 0.0)
    driver = make_driver()
    rig.driver_object(attachRequired=True)

    async def begin() -> Path:
        async with rig.running(rig.new_kind()) as kind:
            await rig.registered(kind)
            return await given(rig, kind, persistent(make_pod(), block=block))

    async def end(*, alone: bool) -> None:
        kind = rig.new_kind()
        if alone:
            await left(kind)
            assert kind.in_use() == {USED}
        async with rig.running(kind):
            await rig.registered(kind)
            await left(kind)
            await rig.until("paid", lambda: not debts(rig))
            await swept(rig, kind)
            assert kind.in_use() == frozenset()

    killed, moment = True, 0
    while killed:
        moment += 1
        place = asyncio.run(begin())
        published = len(driver.calls("NodeUnpublishVolume"))
        killed = dies_at(moment, rig.root, lambda: left(rig.new_kind()))
        target = rig.root / "plugins/kubernetes.io/csi/volumeDevices/publish/pv-vol-1/u-1" if block else place
        if not is_mounted(target):
            assert [path.suffix for path in debts(rig)] == [".json"], f"step {moment}: it is owed"
        asyncio.run(end(alone=moment % 2 == 0))
        assert len(driver.calls("NodeUnpublishVolume")) > published
        assert (rig.left(), driver.loops_left()) == ([], []), f"step {moment}"
    assert moment > 6, "the kills met different moments"


@pytest.mark.looptime
async def test_unpublish_retrier_remove_fails_retries_and_continues(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was paid is asked for again, when it could not be crossed out; others are paid meanwhile."""
    owed, asked, paid = PendingUnpublishStore(tmp_path), [], []
    for number in (1, 2):
        trace = str(tmp_path / "nothing")
        owed.add(PendingUnpublish(driver="d", handle=f"h{number}", target=f"/t{number}", trace=trace))
    settle, broken = owed.remove, True

    def settle_perhaps(debt: PendingUnpublish) -> None:
        if broken and debt.handle == "h1":
            raise OSError(errno.EROFS, "Read-only file system")
        settle(debt)

    monkeypatch.setattr(owed, "remove", settle_perhaps)

    class Client:
        async def unpublish(self, handle: str, path: str) -> None:
            asked.append(handle)

    class OneDriver(Drivers):
        names = frozenset(("d",))

        def client(self, name: str) -> Any:
            return Client()

    paying = UnpublishRetrier(
        owed, OneDriver(CsiNodePublisher(), lambda uid: None), Locks(), lambda: paid.append(1)
    )
    running = asyncio.create_task(paying.run())
    async with asyncio.timeout(600):
        while asked.count("h1") < 3:
            await asyncio.sleep(1)
        assert [debt.handle for debt in owed.all()] == ["h1"]
        broken = False
        while owed.all():
            await asyncio.sleep(1)
    assert not running.done()
    assert asked.count("h2") == 1
    running.cancel()


@pytest.mark.looptime
async def test_unpublish_deadlines_absent_and_failing_driver_expire_separately() -> None:
    """A driver that is not there has half a minute in one piece, one that fails two minutes."""
    waits = UnpublishDeadlines()
    assert not waits.record_failure("p", absent=True)
    await asyncio.sleep(ABSENT_SECONDS - 1)
    assert not waits.record_failure("p", absent=True)
    assert not waits.record_failure("q", absent=True), "each has its own time"
    await asyncio.sleep(1)
    assert waits.record_failure("p", absent=True)
    assert not waits.record_failure("p", absent=False), "it was there again"
    await asyncio.sleep(ABSENT_SECONDS - 1)
    assert not waits.record_failure("p", absent=True)
    await asyncio.sleep(FAILING_SECONDS - 2 * ABSENT_SECONDS + 1)
    assert waits.record_failure("p", absent=False)
    waits.forget("p")
    assert not waits.record_failure("p", absent=False)


def test_pending_unpublish_store_add_and_remove_are_idempotent(tmp_path: Path) -> None:
    book = PendingUnpublishStore(tmp_path)
    assert book.all() == []
    one = PendingUnpublish(driver="d", handle="h", target="/t/1", trace=str(tmp_path / "trace"))
    other = PendingUnpublish(driver="d", handle="i", target="/t/2", trace="/nowhere", ephemeral=True)
    for debt in (one, other, one):
        book.add(debt)
    assert sorted(book.all(), key=lambda debt: debt.target) == [one, other]
    assert book.for_volume(unique_name("d", "i")) == [other]
    (tmp_path / "trace").symlink_to("dangling")
    assert (one.is_due, other.is_due) == (False, True)
    (tmp_path / DIRECTORY / "broken.json").write_text("{")
    assert len(book.all()) == 2
    (tmp_path / DIRECTORY / "broken.json").unlink()
    for debt in (one, other, one):
        book.remove(debt)
    assert list(tmp_path.iterdir()) == [tmp_path / "trace"]
