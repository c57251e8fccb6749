"""Drivers that hang, die, answer late, refuse or register twice: everything ends well."""

import asyncio
import re
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest

from pykubelet.api.meta import from_document
from pykubelet.api.volume import CsiPersistent
from pykubelet.server.metrics.registry_text import text_format
from pykubelet.volumes.csi import paths as volume_data
from pykubelet.volumes.csi import plugin as csi_kind
from pykubelet.volumes.csi.names import PLUGIN_DIR
from pykubelet.volumes.csi.paths import VolumeData, read_data, write_data
from pykubelet.volumes.csi.plugin import CsiPlugin
from pykubelet.volumes.errors import VolumeNotReady, VolumePluginError
from pykubelet.volumes.unmounter import PodVolumeTeardown
from tests.support.csi import Rig, api_of, inline, make_pod, needs_root, persistent
from tests.support.csi_driver.backend import is_mounted
from tests.support.csi_driver.process import DRIVER, DriverProcess
from tests.support.dying import dies_at
from tests.support.metrics_page import Page

pytestmark = [pytest.mark.machine, needs_root]

MakeDriver = Callable[..., DriverProcess]


async def hurry(kind: CsiPlugin, seconds: float) -> None:
    """Let calls end sooner than after two minutes, but for the one that asks what the driver can do."""
    client = kind.drivers.client(DRIVER)
    assert client is not None
    await client.capabilities()
    client._timeout = seconds


async def end(kind: CsiPlugin) -> None:
    """Take everything down that may be there of pod u-1."""
    await kind.tear_down("u-1", "pv-vol-1")
    await kind.tear_down("u-1", "data")
    await kind.unmount_unused(())


async def test_csi_set_up_driver_returns_error_leaves_nothing(rig: Rig, make_driver: MakeDriver) -> None:
    driver = make_driver()
    rig.driver_object()
    wanted = persistent(make_pod(), fsType="ext4")
    async with rig.running() as kind:
        await rig.registered()
        driver.behave(fail={"NodeStageVolume": ["INVALID_ARGUMENT", "no such volume"]})
        with pytest.raises(
            VolumePluginError, match=r"^rpc error: code = InvalidArgument desc = no such volume$"
        ):
            await kind.set_up(wanted)
        assert rig.left() == []
        driver.behave(fail={"NodePublishVolume": ["INTERNAL", "out of order"]})
        with pytest.raises(VolumePluginError, match=r"^rpc error: code = Internal desc = out of order$"):
            await kind.set_up(wanted)
        assert not (rig.root / "pods/u-1/volumes/kubernetes.io~csi/pv-vol-1").exists()
        driver.behave()
        assert is_mounted(Path((await kind.set_up(wanted)).path))
        # It was staged once: the refusal came after that.
        assert driver.names().count("NodeStageVolume") == 2
        await end(kind)
    assert (rig.left(), driver.loops_left()) == ([], [])
    page = Page(text_format(rig.numbers.collect()).decode())
    calls = "csi_operations_seconds_count"
    stage = {"driver_name": DRIVER, "method_name": "/csi.v1.Node/NodeStageVolume", "migrated": "false"}
    assert page.value(calls, grpc_status_code="InvalidArgument", **stage) == 1
    assert page.value(calls, grpc_status_code="OK", **stage) == 1
    done = {"volume_plugin": f"kubernetes.io/csi:{DRIVER}", "operation_name": "unmount_device"}
    assert page.value("storage_operation_duration_seconds_count", status="success", **done) == 1


@pytest.mark.parametrize("call", ["NodeStageVolume", "NodePublishVolume"])
async def test_csi_set_up_call_hangs_is_retried_or_undone(
    rig: Rig, make_driver: MakeDriver, call: str
) -> None:
    """Nobody knows what it did: it is asked again, or asked to undo it when the pod is gone."""
    driver = make_driver()
    rig.driver_object()
    wanted = persistent(make_pod(), fsType="ext4")
    async with rig.running() as kind:
        await rig.registered()
        if call == "NodePublishVolume":
            # Staged before: that takes its time, and must not be what is given up.
            await kind.set_up(persistent(make_pod("u-0"), fsType="ext4"))
        asked = driver.names().count(call)
        await hurry(kind, 5)
        driver.behave(hang=[call])
        with pytest.raises(VolumePluginError, match="code = DeadlineExceeded"):
            await kind.set_up(wanted)
        await hurry(kind, 120)
        assert rig.left() != [], "what must be known to undo it"
        # Another volume of the same driver is not held up by one that waits.
        waiting = asyncio.create_task(kind.set_up(wanted))
        await rig.until("it waits", lambda: driver.names().count(call) == asked + 2)
        driver.behave()
        other = persistent(make_pod("u-2"), "vol-2")
        await kind.set_up(other)
        waiting.cancel()
        with suppress(asyncio.CancelledError, VolumePluginError):
            await waiting
        await kind.tear_down("u-2", "pv-vol-2")
        await kind.tear_down("u-0", "pv-vol-1")
        await end(kind)
    assert (rig.left(), driver.loops_left()) == ([], [])


@pytest.mark.parametrize("call", ["NodeStageVolume", "NodePublishVolume", "NodeUnpublishVolume"])
async def test_csi_driver_dies_during_call_is_retried_after_restart(
    rig: Rig, make_driver: MakeDriver, call: str
) -> None:
    driver = make_driver()
    rig.driver_object()
    wanted = persistent(make_pod(), fsType="ext4")
    async with rig.running() as kind:
        await rig.registered()
        driver.behave(die=[call])
        with pytest.raises(VolumePluginError, match="code = Unavailable"):
            await kind.set_up(wanted)
            await kind.tear_down("u-1", "pv-vol-1")
        driver.kill()
        driver.behave()
        # Its socket is still there, so it counts as registered, but nobody answers.
        with pytest.raises(VolumePluginError, match="code = Unavailable"):
            await kind.set_up(persistent(make_pod("u-2"), "vol-2"))
        told = len(_notified(driver))
        driver.start()
        await rig.until("back", lambda: len(_notified(driver)) > told)
        await kind.set_up(wanted)
        await end(kind)
        await kind.tear_down("u-2", "pv-vol-2")
        await kind.unmount_unused(())
    assert (rig.left(), driver.loops_left()) == ([], [])


async def test_csi_unstage_hangs_other_driver_volumes_unstaged(
    rig: Rig, make_driver: MakeDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its volumes stay staged, those of another driver do not, also those that are left meanwhile."""
    monkeypatch.setattr(csi_kind, "UNSTAGE_TIMEOUT_SECONDS", 0.5)
    slow, quick = make_driver(), make_driver("--name=other.example.com", folder="other")
    rig.driver_object()
    async with rig.running() as kind:
        for name in (DRIVER, "other.example.com"):
            await rig.registered(driver=name)

        async def use_other(handle: str) -> None:
            source = from_document(CsiPersistent, {"driver": "other.example.com", "volumeHandle": handle})
            wanted = replace(persistent(make_pod("u-2"), handle, fsType="ext4"), source=source)
            rig.attach(handle, driver="other.example.com")
            await kind.set_up(wanted)
            await kind.tear_down("u-2", wanted.name)

        await kind.set_up(persistent(make_pod(), fsType="ext4"))
        await kind.tear_down("u-1", "pv-vol-1")
        await hurry(kind, 10)
        slow.behave(hang=["NodeUnstageVolume"])
        for times, handle in enumerate(("vol-2", "vol-3"), start=1):
            await use_other(handle)
            with pytest.raises(
                VolumePluginError, match=f"unstaging of {re.escape(DRIVER)}.* is still under way"
            ):
                await kind.unmount_unused(())

            def unstaged(times: int = times) -> bool:
                staged = rig.root.glob("plugins/kubernetes.io/csi/other.example.com/*")
                return quick.names().count("NodeUnstageVolume") == times and not list(staged)

            await rig.until("unstaged", unstaged)
        slow.behave()
        for _ in range(120):
            with suppress(VolumePluginError):
                await kind.unmount_unused(())
                break
    assert (rig.left(), slow.loops_left(), quick.loops_left()) == ([], [], [])


async def test_csi_set_up_slow_driver_stages_once_for_concurrent_pods(
    rig: Rig, make_driver: MakeDriver
) -> None:
    driver = make_driver()
    rig.driver_object()
    driver.behave(late={"NodeStageVolume": 0.3, "NodePublishVolume": 0.3})
    async with rig.running() as kind:
        await rig.registered()
        pods = [persistent(make_pod(f"u-{n}"), fsType="ext4") for n in range(3)]
        given = await asyncio.gather(*(kind.set_up(wanted) for wanted in pods))
        assert all(is_mounted(Path(mounted.path)) for mounted in given)
        assert driver.names().count("NodeStageVolume") == 1, "one at a time for what they share"
        for wanted in pods:
            await kind.tear_down(wanted.uid, wanted.name)
        await kind.unmount_unused(())
    assert (rig.left(), driver.loops_left()) == ([], [])


async def test_csi_driver_registered_twice_second_is_rejected(rig: Rig, make_driver: MakeDriver) -> None:
    driver = make_driver("--twice")
    async with rig.running() as kind:
        await rig.registered()
        await rig.until(
            "one is refused, one is not",
            lambda: {call.get("plugin_registered", False) for call in _notified(driver)} == {True, False},
        )
        refused = next(call for call in _notified(driver) if not call.get("plugin_registered"))
        assert "Another driver with the same name is" in refused["error"]
        (entry,) = _csi_node(rig)["spec"]["drivers"]
        assert entry["name"] == DRIVER
        assert kind.drivers.names == {DRIVER}


async def test_csi_driver_newer_version_replaces_old_and_stays(rig: Rig, make_driver: MakeDriver) -> None:
    """The old one leaves when it has been replaced: that is not the new one's end."""
    old = make_driver("--no-stage")
    async with rig.running() as kind:
        await rig.registered()
        new = DriverProcess(rig.base / "new", rig.registry / "new", "--no-stage", "--versions=1.1.0")
        new.start()
        try:
            await rig.until("taken over", lambda: _endpoint(kind) == new.socket)
            old.stop()
            await rig.until("the old one left", lambda: not list(rig.registry.glob("*.sock")))
            await asyncio.sleep(0.2)
            assert _endpoint(kind) == new.socket
            assert [driver["name"] for driver in _csi_node(rig)["spec"]["drivers"]] == [DRIVER]
        finally:
            new.kill()


async def test_csi_driver_unregistered_is_removed_from_csinode_and_node(
    rig: Rig, make_driver: MakeDriver
) -> None:
    driver = make_driver("--topology=zone.example.com/rack=r1", "--limit=7", "--node-id=this")
    async with rig.running() as kind:
        await rig.registered()
        node = api_of(rig).objects[("nodes", "", "node-of-tests")]["metadata"]
        assert node["annotations"] == {"csi.volume.kubernetes.io/nodeid": f'{{"{DRIVER}":"this"}}'}
        assert node["labels"] == {"zone.example.com/rack": "r1"}
        (entry,) = _csi_node(rig)["spec"]["drivers"]
        assert entry == {
            "name": DRIVER,
            "nodeID": "this",
            "topologyKeys": ["zone.example.com/rack"],
            "allocatable": {"count": 7},
        }
        driver.stop()
        await rig.until("gone", lambda: not _csi_node(rig)["spec"]["drivers"])
        assert kind.drivers.names == frozenset()
        node = api_of(rig).objects[("nodes", "", "node-of-tests")]["metadata"]
        await rig.until("told", lambda: not _annotations(rig))


async def test_csi_driver_empty_node_id_registration_fails(rig: Rig, make_driver: MakeDriver) -> None:
    driver = make_driver("--node-id=")
    async with rig.running() as kind:
        await rig.until("refused", lambda: _notified(driver))
        assert "driverNodeID must not be empty" in _notified(driver)[0]["error"]
        assert kind.drivers.names == frozenset()


async def test_csi_tear_down_driver_unregistered_waits_until_it_returns(
    rig: Rig, make_driver: MakeDriver
) -> None:
    driver = make_driver()
    rig.driver_object()
    async with rig.running() as kind:
        await rig.registered()
        await kind.set_up(persistent(make_pod()))
        driver.stop()
        await rig.until("gone", lambda: not kind.drivers.names)
        with pytest.raises(VolumeNotReady):
            await kind.tear_down("u-1", "pv-vol-1")
        await kind.unmount_unused(())
        driver.start()
        await rig.until("woken", lambda: rig.woken == ["u-1"])
        await end(kind)
    assert rig.left() == []


async def test_csi_tear_down_target_not_empty_keeps_files(rig: Rig, make_driver: MakeDriver) -> None:
    """What a driver did not unmount, or put into a plain directory, is the volume's and not ours."""
    driver = make_driver("--no-stage")
    rig.driver_object()
    async with rig.running() as kind:
        await rig.registered()
        path = Path((await kind.set_up(inline(make_pod()))).path)
        await kind.tear_down("u-1", "data")
        write_data(path.parent / "vol_data.json", VolumeData("other", DRIVER))
        path.mkdir()
        (path / "precious").touch()
        driver.behave()
        with pytest.raises(VolumePluginError):
            await kind.tear_down("u-1", "data")
        assert (path / "precious").exists()
        (path / "precious").unlink()
        await kind.tear_down("u-1", "data")
    assert rig.left() == []


@pytest.mark.parametrize("block", [False, True], ids=["files", "device"])
def test_csi_set_up_kubelet_killed_at_any_step_next_one_recovers(
    rig: Rig, make_driver: MakeDriver, monkeypatch: pytest.MonkeyPatch, block: bool
) -> None:
    """Before each thing that they change: the next agent goes on, or takes all of it down."""
    driver = make_driver()
    rig.driver_object()
    wanted = persistent(make_pod(), block=block, fsType="" if block else "ext4")

    async def mount() -> None:
        async with rig.running(rig.new_kind()) as kind:
            await rig.registered(kind)
            await kind.set_up(wanted)

    async def finish(*, mount: bool) -> None:
        async with rig.running(rig.new_kind()) as kind:
            await rig.registered(kind)
            if mount:
                mounted = await kind.set_up(wanted)
                found = Path(mounted.path or mounted.device)
                assert found.is_block_device() if block else is_mounted(found)
            await end(kind)
            PodVolumeTeardown(rig.root, "u-1", [PLUGIN_DIR]).remove_all()
            await kind.unmount_unused(())

    monkeypatch.setattr(volume_data, "ABANDONED_SECONDS", -1.0)
    moment = 1
    while dies_at(moment, rig.root, mount):
        asyncio.run(finish(mount=False))
        assert (rig.left(), driver.loops_left()) == ([], []), f"step {moment}"
        assert dies_at(moment, rig.root, mount)
        asyncio.run(finish(mount=True))
        assert (rig.left(), driver.loops_left()) == ([], []), f"step {moment}"
        moment += 1
    asyncio.run(finish(mount=False))
    assert moment > 4, "the kills met different moments"


async def test_csi_tear_down_vol_data_deleted_unmounts_and_unstages(
    rig: Rig, make_driver: MakeDriver
) -> None:
    """The pod can go, and what was staged is unstaged."""
    driver = make_driver()
    rig.driver_object()
    async with rig.running() as kind:
        await rig.registered()
        place = Path((await kind.set_up(persistent(make_pod(), fsType="ext4"))).path)
        (place.parent / "vol_data.json").unlink()
        await kind.tear_down("u-1", "pv-vol-1")
        PodVolumeTeardown(rig.root, "u-1", [PLUGIN_DIR]).remove_all()
        assert not place.parent.exists()
        await kind.unmount_unused(())
    assert (rig.left(), driver.loops_left()) == ([], [])


async def test_read_data_invalid_file_returns_none(rig: Rig, tmp_path: Path) -> None:
    file = tmp_path / "vol_data.json"
    for text in ("", "{", "[]", '{"volumeHandle": 1}', "\xff"):
        file.write_text(text, encoding="latin-1")
        assert read_data(file) is None
    await rig.kind.tear_down("u-1", "never-there")


def _notified(driver: DriverProcess) -> list[dict[str, str]]:
    return driver.calls("NotifyRegistrationStatus")


def _csi_node(rig: Rig) -> dict[str, dict[str, list[dict[str, object]]]]:
    return api_of(rig).objects[("csinodes", "", "node-of-tests")]


def _annotations(rig: Rig) -> dict[str, str]:
    meta = api_of(rig).objects[("nodes", "", "node-of-tests")]["metadata"]
    found: dict[str, str] = meta.get("annotations", {})
    return found


def _endpoint(kind: CsiPlugin) -> str:
    client = kind.drivers.client(DRIVER)
    return client.endpoint if client is not None else ""
