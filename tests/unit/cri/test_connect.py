"""Every way in which there can be no usable runtime has its own line."""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import time
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry

from pykubelet.api.duration import Duration
from pykubelet.cri import runtime_pb2 as pb
from pykubelet.cri.channel import CriMetrics
from pykubelet.cri.connect import RuntimeConnection, connect
from pykubelet.transport.errors import ConnectError, CriError, EndpointError
from tests.support.cri_servers import VERSION, Hang, Refuse, Runtime, raw_server


async def refused(endpoint: str, image_endpoint: str = "", *, within: float = 30) -> ConnectError:
    """Try to connect, and give the error, which must be one line and come in time."""
    started = time.monotonic()
    with pytest.raises(ConnectError) as caught:
        await connect(
            endpoint,
            image_endpoint,
            timeout=Duration.from_seconds(30),
            metrics=CriMetrics(CollectorRegistry()),
            connect_timeout=Duration.from_seconds(within),
        )
    assert time.monotonic() - started < within + 15
    assert "\n" not in str(caught.value)
    assert ";" in str(caught.value), "a remedy is given"
    return caught.value


async def test_connect_valid_endpoint_returns_version_on_one_connection(
    scripted: Runtime, metrics: CriMetrics
) -> None:
    async with await connect(
        f"unix://{scripted.path}", timeout=Duration.from_seconds(30), metrics=metrics
    ) as cri:
        assert cri.version == VERSION
        assert len(cri.channels) == 1, "one endpoint, one connection"
    assert [seen.method for seen in scripted.seen] == ["Version", "ImageFsInfo"]


async def test_connect_bare_path_accepted_with_deprecation_warning(
    scripted: Runtime, metrics: CriMetrics, records: list[logging.LogRecord]
) -> None:
    async with await connect(str(scripted.path), timeout=Duration.from_seconds(30), metrics=metrics):
        pass
    assert [r.levelname for r in records if "deprecated" in r.getMessage()] == ["WARNING"]


async def test_connect_path_with_special_characters_succeeds(folder: Path, metrics: CriMetrics) -> None:
    path = folder / "a b%20?#ü.sock"
    async with Runtime(folder / "plain.sock") as server:
        (folder / "plain.sock").rename(path)
        async with await connect(str(path), timeout=Duration.from_seconds(30), metrics=metrics) as cri:
            assert (await cri.runtime.version()) == VERSION
        assert server.seen


async def test_connect_separate_image_endpoint_uses_two_connections(
    folder: Path, metrics: CriMetrics
) -> None:
    async with (
        Runtime(folder / "r.sock", services=("RuntimeService",)) as runtime,
        Runtime(folder / "i.sock", services=("ImageService",)) as images,
        await connect(
            f"unix://{runtime.path}",
            f"unix://{images.path}",
            timeout=Duration.from_seconds(30),
            metrics=metrics,
        ) as cri,
    ):
        assert len(cri.channels) == 2
        await cri.images.list_images()
        await cri.runtime.list_containers()
        assert [seen.method for seen in runtime.seen] == ["Version", "ListContainers"]
        assert [seen.method for seen in images.seen] == ["ImageFsInfo", "ListImages"]


async def test_connect_image_endpoint_without_image_service_raises_error(
    scripted: Runtime, folder: Path
) -> None:
    async with Runtime(folder / "i.sock", services=("RuntimeService",)) as other:
        err = await refused(f"unix://{scripted.path}", f"unix://{other.path}")
    assert "no CRI v1 image service" in str(err)
    assert "--image-service-endpoint" in str(err)
    assert "i.sock" in str(err)


async def test_connect_socket_missing_error_names_path(folder: Path) -> None:
    err = await refused(f"unix://{folder}/none.sock")
    assert "does not exist" in str(err)
    assert "none.sock" in str(err)


async def test_connect_image_socket_missing_error_names_path(scripted: Runtime, folder: Path) -> None:
    assert "none.sock" in str(await refused(f"unix://{scripted.path}", f"unix://{folder}/none.sock"))


@pytest.mark.parametrize(
    ("make", "kind"), [(Path.touch, "a file"), (Path.mkdir, "a folder"), (os.mkfifo, "a pipe")]
)
async def test_connect_path_not_socket_error_names_file_type(folder: Path, make: object, kind: str) -> None:
    path = folder / "thing"
    assert callable(make)
    make(path)
    assert f"is {kind}, not a socket" in str(await refused(f"unix://{path}"))


async def test_connect_path_component_is_file_raises_error(folder: Path) -> None:
    (folder / "file").touch()
    assert "Not a directory" in str(await refused(f"unix://{folder}/file/cri.sock"))


async def test_connect_stale_socket_error_reports_no_listener(folder: Path) -> None:
    path = folder / "stale.sock"
    with socket.socket(socket.AF_UNIX) as left:
        left.bind(str(path))
    assert "nothing listens" in str(await refused(f"unix://{path}"))


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become somebody else")
async def test_connect_permission_denied_raises_error(scripted: Runtime, folder: Path) -> None:
    folder.chmod(0o755)
    scripted.path.chmod(0o600)
    os.seteuid(65534)
    try:
        err = await refused(f"unix://{scripted.path}")
    finally:
        os.seteuid(0)
    assert "no permission" in str(err)
    assert err.code == "PermissionDenied"


@pytest.mark.parametrize(
    "speech",
    [b"HTTP/1.1 400 Bad Request\r\nConnection: close\r\n\r\n", bytes(range(64)), b"", b"\0\0\0"],
    ids=["http1", "garbage", "hangs-up", "too-short"],
)
async def test_connect_server_without_grpc_raises_error(folder: Path, speech: bytes) -> None:
    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read(1)
        writer.write(speech)

    async with raw_server(folder / "cri.sock", talk):
        assert "does not speak gRPC" in str(await refused(f"unix://{folder}/cri.sock"))


async def test_connect_silent_server_raises_deadline_exceeded(folder: Path) -> None:
    async def silence(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read()

    async with raw_server(folder / "cri.sock", silence):
        err = await refused(f"unix://{folder}/cri.sock", within=0.3)
    assert "answered nothing within 0.3s" in str(err)
    assert err.code == "DeadlineExceeded"


@pytest.mark.parametrize("method", ["Version", "ImageFsInfo"])
async def test_connect_call_without_response_raises_timeout_error(scripted: Runtime, method: str) -> None:
    hang = Hang()
    scripted.answers[method] = hang
    assert "answered nothing within 1.5s" in str(await refused(f"unix://{scripted.path}", within=1.5))
    # On a busy machine the time may be up before it has come so far.
    if hang.begun.is_set():
        await asyncio.wait_for(hang.given_up.wait(), 30)


async def test_connect_cri_v1alpha2_only_error_names_version(folder: Path) -> None:
    old = pb.VersionResponse(
        version="0.1.0", runtime_name="oldie", runtime_version="1.5.0", runtime_api_version="v1alpha2"
    )
    async with Runtime(folder / "cri.sock", {"Version": old}, prefix="/runtime.v1alpha2.") as server:
        err = await refused(f"unix://{server.path}")
    assert "oldie 1.5.0" in str(err)
    assert "speaks CRI v1alpha2, this agent only v1" in str(err)


async def test_connect_grpc_server_without_cri_raises_error(folder: Path) -> None:
    async with Runtime(folder / "cri.sock", services=()) as server:
        err = await refused(f"unix://{server.path}")
    assert "neither v1 nor v1alpha2" in str(err)
    assert "disabled_plugins" in str(err)


async def test_connect_unsupported_kubelet_api_version_raises_error(scripted: Runtime) -> None:
    scripted.answers["Version"] = pb.VersionResponse(
        version="9.9.9", runtime_name="odd", runtime_version="1", runtime_api_version="v1"
    )
    assert "9.9.9" in str(await refused(f"unix://{scripted.path}"))


async def test_connect_incomplete_version_response_raises_error(scripted: Runtime) -> None:
    scripted.answers["Version"] = pb.VersionResponse(version="0.1.0")
    assert "not set: runtime_name, runtime_version" in str(await refused(f"unix://{scripted.path}"))


async def test_connect_internal_error_raised_immediately(scripted: Runtime) -> None:
    scripted.answers["Version"] = Refuse("INTERNAL", "the disk is on fire")
    err = await refused(f"unix://{scripted.path}", within=30)
    assert "Version: rpc error: code = Internal desc = the disk is on fire" in str(err)


async def test_connect_runtime_initializing_retried_until_ready(
    scripted: Runtime, metrics: CriMetrics
) -> None:
    scripted.answers["Version"] = Refuse("UNKNOWN", "server is not initialized yet")

    async def ready_later() -> None:
        await asyncio.sleep(0.3)
        scripted.answers["Version"] = VERSION

    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(ready_later())
        cri = await connect(f"unix://{scripted.path}", timeout=Duration.from_seconds(30), metrics=metrics)
    async with cri:
        assert cri.version == VERSION


async def test_connect_runtime_never_initialized_raises_after_timeout(scripted: Runtime) -> None:
    scripted.answers["Version"] = Refuse("UNKNOWN", "server is not initialized yet")
    err = await refused(f"unix://{scripted.path}", within=5)
    assert "not ready within 5s" in str(err)
    assert "not initialized yet" in str(err)


async def test_connect_invalid_endpoint_raises_endpoint_error() -> None:
    err = await refused("tcp://localhost:1")
    assert isinstance(err, EndpointError)
    assert isinstance(err, ValueError)
    assert isinstance(err, CriError)


async def test_connect_cancelled_while_server_silent(folder: Path) -> None:
    async def silence(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read()

    async with raw_server(folder / "cri.sock", silence):
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.1):
                await connect(
                    f"unix://{folder}/cri.sock",
                    timeout=Duration.from_seconds(30),
                    metrics=CriMetrics(CollectorRegistry()),
                )


async def test_connect_handshake_not_counted_in_metrics(
    cri: RuntimeConnection, registry: CollectorRegistry
) -> None:
    assert (
        registry.get_sample_value("kubelet_runtime_operations_total", {"operation_type": "version"}) is None
    )
