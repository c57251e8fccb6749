"""Device plugins that die, hang and lie, and a disk that fails: who suffers from it, and who does not."""

import asyncio
from pathlib import Path
from typing import Any

import pytest

from pykubelet.cm.devices import manager as device_manager
from pykubelet.cm.devices import plugins as device_plugin
from pykubelet.cm.topology.hints import AllocationError, PolicyError
from tests.support.device_plugin.process import RESOURCE, plugin_process
from tests.support.pod_resources import pod_of
from tests.unit.cm.device_node import TWO, node_in, plugin_in, wanting


async def test_device_manager_plugin_restarts_devices_are_available_again(tmp_path: Path) -> None:
    async with node_in(tmp_path) as node:
        with plugin_in(tmp_path, *TWO, "--pre-start") as plugin:
            await node.offers(2)
            pod, other = wanting(1), wanting(1)
            await node.admit(pod)
            plugin.kill()
            await node.offers(2, 0)
            with pytest.raises(AllocationError) as caught:
                await node.admit(other)
            text = f"no healthy devices present; cannot allocate unhealthy devices {RESOURCE}"
            assert str(caught.value) == text
            with pytest.raises(AllocationError, match="PreStartContainer rpc failed"):
                await node.manager.grants(pod, pod.spec.containers[0])
            plugin.start("--mark=second")
            await node.offers(2)
            await node.admit(other)
            grants = [await node.manager.grants(one, one.spec.containers[0]) for one in (pod, other)]
            assert [one.env["TEST_PLUGIN"] for one in grants] == ["first", "second"]


@pytest.mark.parametrize("call", ["Allocate", "GetPreferredAllocation", "PreStartContainer"])
async def test_device_manager_plugin_dies_during_call_raises_allocation_error(
    tmp_path: Path, call: str
) -> None:
    async with node_in(tmp_path) as node:
        with plugin_in(tmp_path, *TWO, "--pre-start", "--prefers") as plugin:
            await node.offers(2)
            pod = wanting(1)
            plugin.behave(die=[call])
            with pytest.raises(AllocationError, match="Unavailable"):
                await node.admit(pod)
                await node.manager.grants(pod, pod.spec.containers[0])
            await node.offers(2, 0)


async def test_device_manager_plugin_hangs_does_not_block_other_plugins(tmp_path: Path) -> None:
    other = "example.com/other"
    async with node_in(tmp_path) as node:
        with plugin_in(tmp_path, *TWO) as plugin:
            options = ("--device=x", f"--resource={other}", "--socket=dongle2.sock")
            with plugin_process(tmp_path / "second", node.folder, *options):
                await node.offers(2)
                await node.offers(1, resource=other)
                plugin.behave(hang=["Allocate"])
                stuck = asyncio.ensure_future(node.admit(wanting(1)))
                await node.until(lambda: plugin.calls("Allocate"))
                await node.admit(pod_of({"limits": {other: "1"}}))
                assert not stuck.done()
                plugin.kill()
                with pytest.raises(AllocationError, match="Unavailable"):
                    await stuck
                await node.offers(2, 0)
                plugin.behave()
                plugin.start()
                await node.offers(2)
                both = wanting(2)
                await node.admit(both)  # nothing was lost by it
                assert node.ids(both) == "d1,d2"


@pytest.mark.parametrize(
    ("behaviour", "problem"),
    [
        ({"answers": 0}, "no containers return in allocation response"),
        ({"fail": {"Allocate": ["INVALID_ARGUMENT", "the dongle is warm"]}}, "desc = the dongle is warm"),
    ],
)
async def test_device_manager_plugin_error_rejects_pod_and_releases_devices(
    tmp_path: Path, behaviour: dict[str, Any], problem: str
) -> None:
    async with node_in(tmp_path) as node:
        with plugin_in(tmp_path, *TWO) as plugin:
            await node.offers(2)
            pod = wanting(2)
            plugin.behave(**behaviour)
            with pytest.raises(AllocationError, match=problem):
                await node.admit(pod)
            plugin.behave()
            await node.admit(pod)
            assert node.ids(pod) == "d1,d2"


async def test_device_manager_plugin_stopped_allocate_times_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(device_plugin, "ALLOCATE_SECONDS", 0.5)
    async with node_in(tmp_path) as node:
        with plugin_in(tmp_path, *TWO) as plugin:
            await node.offers(2)
            plugin.pause()
            pod = wanting(1)
            with pytest.raises(AllocationError, match="context deadline exceeded"):
                await node.admit(pod)
            assert node.ids(pod) == ""
            plugin.kill()
            await node.offers(2, 0)


async def test_device_manager_list_and_watch_ends_marks_devices_unhealthy(tmp_path: Path) -> None:
    async with node_in(tmp_path) as node:
        with plugin_in(tmp_path, *TWO) as plugin:
            await node.offers(2)
            plugin.behave(end_list=True)
            await node.offers(2, 0)


async def test_device_manager_checkpoint_write_fails_rejects_pod(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(path: Path, content: bytes) -> None:
        raise OSError(28, "No space left on device")

    async with node_in(tmp_path) as node:
        with plugin_in(tmp_path, *TWO):
            await node.offers(2)
            pod = wanting(1)
            monkeypatch.setattr(device_manager, "write_checkpoint", full)
            with pytest.raises(AllocationError, match="failed to write checkpoint file"):
                await node.admit(pod)


async def test_device_manager_damaged_checkpoint_raises_policy_error(tmp_path: Path) -> None:
    folder = tmp_path / "device-plugins"
    folder.mkdir()
    (folder / "kubelet_internal_checkpoint").write_text('{"Data":{},"Checksum":1}')
    with pytest.raises(PolicyError, match="kubelet_internal_checkpoint"):
        async with node_in(tmp_path):
            pass
