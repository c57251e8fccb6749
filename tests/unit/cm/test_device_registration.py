"""How device plugins come and go: both ways to register, taking over, being refused and being forgotten."""

import asyncio
import socket
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any

import grpc.aio
import pytest

from pykubelet.cm.devices import device_plugin_pb2 as pb
from pykubelet.cm.devices import manager as device_manager
from pykubelet.cm.devices import plugins as device_plugin
from pykubelet.cm.devices import plugins as device_plugins
from pykubelet.pluginmanager.registration import Plugin, PluginRegistration
from pykubelet.transport.grpc_server import GrpcError, StreamingMethod, UnaryMethod, serving
from pykubelet.util.tasks import TaskScope
from tests.support.device_plugin.process import RESOURCE, plugin_process
from tests.unit.cm.device_node import TWO, node_in, plugin_in, wanting


async def test_register_same_resource_twice_new_endpoint_replaces_old(tmp_path: Path) -> None:
    async with node_in(tmp_path) as node:
        with plugin_in(tmp_path, *TWO) as first:
            await node.offers(2)
            pod = wanting(1)
            await node.admit(pod)
            options = ("--device=d1", "--device=d2", "--device=d3", "--socket=dongle2.sock", "--mark=second")
            with plugin_process(tmp_path / "second", node.folder, *options) as second:
                await node.offers(3)
                await node.until(lambda: first.registrations() and second.registrations())
                assert (first.registrations(), second.registrations()) == (["registered"], ["registered"])
                other = wanting(1)
                await node.admit(other)
                grants = await node.manager.grants(other, other.spec.containers[0])
                assert grants.env["TEST_PLUGIN"] == "second"
                # The end of the one before means nothing any more.
                first.kill()
                await node.admit(wanting(1))
                assert node.numbers() == (3, 3)


async def test_device_plugin_kubelet_restart_registers_again(tmp_path: Path) -> None:
    with plugin_in(tmp_path, *TWO) as plugin:
        for times in (1, 2):
            async with node_in(tmp_path) as node:
                await node.offers(2)
                while len(plugin.registrations()) < times:
                    await asyncio.sleep(0.01)
        assert plugin.registrations() == ["registered"] * 2


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        (
            ["--version=v1alpha"],
            'requested API version "v1alpha" is not supported by kubelet. Supported version is ["v1beta1"]',
        ),
        (["--resource=cpu"], 'the ResourceName "cpu" is invalid'),
        (["--resource=kubernetes.io/x"], 'the ResourceName "kubernetes.io/x" is invalid'),
    ],
)
async def test_register_invalid_version_or_resource_name_rejected(
    tmp_path: Path, options: list[str], problem: str
) -> None:
    async with node_in(tmp_path) as node:
        with plugin_in(tmp_path, *options) as plugin:
            await node.until(plugin.registrations)
            assert plugin.registrations() == [f"UNKNOWN: {problem}"]
        assert node.manager.amounts() == ({}, {}, [])


async def test_register_unreachable_endpoint_returns_unknown_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(device_plugin, "CONNECT_SECONDS", 0.3)
    async with node_in(tmp_path) as node:
        silent = socket.socket(socket.AF_UNIX)
        silent.bind(str(node.folder / "silent.sock"))
        silent.listen()
        async with grpc.aio.insecure_channel(f"unix://{node.folder / 'kubelet.sock'}") as channel:
            call = channel.unary_unary("/v1beta1.Registration/Register")
            for endpoint in ("nobody.sock", "silent.sock", "kubelet.sock", "", "\0", "x" * 200, "../../x"):
                request = pb.RegisterRequest(version="v1beta1", endpoint=endpoint, resource_name=RESOURCE)
                with pytest.raises(grpc.aio.AioRpcError) as caught:
                    await call(request.SerializeToString(), timeout=60)
                assert caught.value.code() == grpc.StatusCode.UNKNOWN, endpoint
        silent.close()
        assert node.manager.amounts() == ({}, {}, [])


def _failing_plugin(call: str) -> dict[str, Any]:
    """Return the methods of a plugin one of whose calls fails."""

    async def options(_: pb.Empty) -> pb.DevicePluginOptions:
        if call == "GetDevicePluginOptions":
            raise GrpcError("UNKNOWN", f"{call} failed")
        return pb.DevicePluginOptions()

    async def devices(_: pb.Empty) -> AsyncGenerator[pb.ListAndWatchResponse, None]:
        raise GrpcError("UNKNOWN", f"{call} failed")
        yield  # pragma: no cover

    return {
        "/v1beta1.DevicePlugin/GetDevicePluginOptions": UnaryMethod(pb.Empty, options),
        "/v1beta1.DevicePlugin/ListAndWatch": StreamingMethod(pb.Empty, devices),
    }


async def _register(folder: Path, endpoint: str) -> None:
    async with grpc.aio.insecure_channel(f"unix://{folder / 'kubelet.sock'}") as channel:
        call = channel.unary_unary("/v1beta1.Registration/Register")
        request = pb.RegisterRequest(version="v1beta1", endpoint=endpoint, resource_name=RESOURCE)
        await call(request.SerializeToString(), timeout=60)


async def test_register_plugin_options_fail_error_names_call(tmp_path: Path) -> None:
    async with node_in(tmp_path) as node:
        methods = _failing_plugin("GetDevicePluginOptions")
        async with serving(node.folder / "bad.sock", methods):
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await _register(node.folder, "bad.sock")
        assert caught.value.details() == (
            "failed to get device plugin options: "
            "rpc error: code = Unknown desc = GetDevicePluginOptions failed"
        )
        assert node.manager.amounts() == ({}, {}, [])


async def test_register_first_list_fails_resource_has_capacity_zero(tmp_path: Path) -> None:
    """Verify that a plugin whose ListAndWatch fails at once leaves a resource of 0 devices."""
    async with node_in(tmp_path) as node:
        async with serving(node.folder / "bad.sock", _failing_plugin("ListAndWatch")):
            await _register(node.folder, "bad.sock")
            await node.until(lambda: node.numbers() is not None)
        assert node.numbers() == (0, 0)


async def test_registration_problem_server_stopped_returns_message(tmp_path: Path) -> None:
    async with node_in(tmp_path) as node:
        assert node.manager.registration_problem() is None
    assert "no device plugins can register" in (node.manager.registration_problem() or "")


async def test_plugin_registration_device_plugin_socket_registers_and_deregisters(tmp_path: Path) -> None:
    registry = tmp_path / "registry"
    registry.mkdir()
    async with node_in(tmp_path) as node, TaskScope() as scope:
        with plugin_in(tmp_path, *TWO, f"--registry={registry}"):
            handlers = {"DevicePlugin": node.manager.handler}
            scope.start(PluginRegistration(registry, handlers).run(), name="registration")
            await node.offers(2)
            (registry / "dongle.sock").unlink()
            await node.offers(2, 0)


@pytest.mark.looptime
async def test_device_resource_plugin_gone_removed_after_five_minutes(tmp_path: Path) -> None:
    folder = tmp_path / "device-plugins"
    loop = asyncio.get_running_loop()
    silent = loop.create_future()

    async def options(_: pb.Empty) -> pb.DevicePluginOptions:
        return pb.DevicePluginOptions()

    async def devices(_: pb.Empty) -> AsyncGenerator[pb.ListAndWatchResponse, None]:
        yield pb.ListAndWatchResponse(devices=[pb.Device(ID="d1", health="Healthy")])
        await silent

    methods: dict[str, Any] = {
        "/v1beta1.DevicePlugin/GetDevicePluginOptions": UnaryMethod(pb.Empty, options),
        "/v1beta1.DevicePlugin/ListAndWatch": StreamingMethod(pb.Empty, devices),
    }
    async with node_in(tmp_path) as node:
        node.breath = 0.002
        plugin = Plugin("DevicePlugin", RESOURCE, str(folder / "p.sock"), ("v1beta1",))
        async with serving(folder / "p.sock", methods):
            await node.manager.handler.register(plugin)
            await node.offers(1)
        await node.offers(1, 0)
        began = loop.time()
        await asyncio.sleep(device_plugins.GRACE_SECONDS - 30)
        assert node.numbers() == (1, 0)
        async with serving(folder / "p.sock", methods):
            await node.manager.handler.register(plugin)
            await node.offers(1)
            await asyncio.sleep(60)
            assert node.numbers() == (1, 1)
        await node.offers(1, 0)
        again = loop.time()
        await node.until(lambda: node.numbers() is None, 1000, 1.0)
        assert loop.time() - again == pytest.approx(300, abs=5)
        assert loop.time() - began > 500
        assert node.manager.amounts() == ({}, {}, [RESOURCE])
        await node.until(lambda: node.checkpoint()["RegisteredDevices"] == {})


async def test_device_plugin_directory_labelled_for_containers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shared: list[Path] = []
    monkeypatch.setattr(device_manager, "label_for_containers", shared.append)
    async with node_in(tmp_path) as node:
        assert shared == [node.folder]
