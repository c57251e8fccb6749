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
from tests.cri.servers import VERSION, Hang, Refuse, Runtime, raw_server


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


async def test_connects_and_says_who_is_there(scripted: Runtime, metrics: CriMetrics) -> None:
    async with await connect(
        f"unix://{scripted.path}", timeout=Duration.from_seconds(30), metrics=metrics
    ) as cri:
        assert cri.version == VERSION
        assert len(cri.channels) == 1, "one endpoint, one connection"
    assert [seen.method for seen in scripted.seen] == ["Version", "ImageFsInfo"]


async def test_bare_path_is_accepted_with_a_warning(
    scripted: Runtime, metrics: CriMetrics, records: list[logging.LogRecord]
) -> None:
    async with await connect(str(scripted.path), timeout=Duration.from_seconds(30), metrics=metrics):
        pass
    assert [r.levelname for r in records if "deprecated" in r.getMessage()] == ["WARNING"]


async def test_path_with_special_characters(folder: Path, metrics: CriMetrics) -> None:
    path = folder / "a b%20?#ü.sock"
    async with Runtime(folder / "plain.sock") as server:
        (folder / "plain.sock").rename(path)
        async with await connect(str(path), timeout=Duration.from_seconds(30), metrics=metrics) as cri:
            assert (await cri.runtime.version()) == VERSION
        assert server.seen


async def test_image_service_elsewhere(folder: Path, metrics: CriMetrics) -> None:
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


async def test_image_endpoint_without_images(scripted: Runtime, folder: Path) -> None:
    async with Runtime(folder / "i.sock", services=("RuntimeService",)) as other:
        err = await refused(f"unix://{scripted.path}", f"unix://{other.path}")
    assert "no CRI v1 image service" in str(err)
    assert "--image-service-endpoint" in str(err)
    assert "i.sock" in str(err)


async def test_missing_socket(folder: Path) -> None:
    err = await refused(f"unix://{folder}/none.sock")
    assert "does not exist" in str(err)
    assert "none.sock" in str(err)


async def test_missing_image_socket(scripted: Runtime, folder: Path) -> None:
    assert "none.sock" in str(await refused(f"unix://{scripted.path}", f"unix://{folder}/none.sock"))


@pytest.mark.parametrize(
    ("make", "kind"), [(Path.touch, "a file"), (Path.mkdir, "a folder"), (os.mkfifo, "a pipe")]
)
async def test_not_a_socket(folder: Path, make: object, kind: str) -> None:
    path = folder / "thing"
    assert callable(make)
    make(path)
    assert f"is {kind}, not a socket" in str(await refused(f"unix://{path}"))


async def test_part_of_the_path_is_a_file(folder: Path) -> None:
    (folder / "file").touch()
    assert "Not a directory" in str(await refused(f"unix://{folder}/file/cri.sock"))


async def test_nobody_listens(folder: Path) -> None:
    path = folder / "stale.sock"
    with socket.socket(socket.AF_UNIX) as left:
        left.bind(str(path))
    assert "nothing listens" in str(await refused(f"unix://{path}"))


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become somebody else")
async def test_no_permission(scripted: Runtime, folder: Path) -> None:
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
async def test_not_grpc(folder: Path, speech: bytes) -> None:
    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read(1)
        writer.write(speech)

    async with raw_server(folder / "cri.sock", talk):
        assert "does not speak gRPC" in str(await refused(f"unix://{folder}/cri.sock"))


async def test_answers_nothing(folder: Path) -> None:
    async def silence(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read()

    async with raw_server(folder / "cri.sock", silence):
        err = await refused(f"unix://{folder}/cri.sock", within=0.3)
    assert "answered nothing within 0.3s" in str(err)
    assert err.code == "DeadlineExceeded"


@pytest.mark.parametrize("method", ["Version", "ImageFsInfo"])
async def test_answers_no_call(scripted: Runtime, method: str) -> None:
    hang = Hang()
    scripted.answers[method] = hang
    assert "answered nothing within 1.5s" in str(await refused(f"unix://{scripted.path}", within=1.5))
    # On a busy machine the time may be up before it has come so far.
    if hang.begun.is_set():
        await asyncio.wait_for(hang.given_up.wait(), 30)


async def test_only_the_old_version(folder: Path) -> None:
    old = pb.VersionResponse(
        version="0.1.0", runtime_name="oldie", runtime_version="1.5.0", runtime_api_version="v1alpha2"
    )
    async with Runtime(folder / "cri.sock", {"Version": old}, prefix="/runtime.v1alpha2.") as server:
        err = await refused(f"unix://{server.path}")
    assert "oldie 1.5.0" in str(err)
    assert "speaks CRI v1alpha2, this agent only v1" in str(err)


async def test_grpc_but_not_a_runtime(folder: Path) -> None:
    async with Runtime(folder / "cri.sock", services=()) as server:
        err = await refused(f"unix://{server.path}")
    assert "neither v1 nor v1alpha2" in str(err)
    assert "disabled_plugins" in str(err)


async def test_another_agent_version(scripted: Runtime) -> None:
    scripted.answers["Version"] = pb.VersionResponse(
        version="9.9.9", runtime_name="odd", runtime_version="1", runtime_api_version="v1"
    )
    assert "9.9.9" in str(await refused(f"unix://{scripted.path}"))


async def test_half_a_version(scripted: Runtime) -> None:
    scripted.answers["Version"] = pb.VersionResponse(version="0.1.0")
    assert "not set: runtime_name, runtime_version" in str(await refused(f"unix://{scripted.path}"))


async def test_a_broken_runtime_is_an_error_at_once(scripted: Runtime) -> None:
    scripted.answers["Version"] = Refuse("INTERNAL", "the disk is on fire")
    err = await refused(f"unix://{scripted.path}", within=30)
    assert "Version: rpc error: code = Internal desc = the disk is on fire" in str(err)


async def test_waits_for_a_runtime_that_is_starting(scripted: Runtime, metrics: CriMetrics) -> None:
    scripted.answers["Version"] = Refuse("UNKNOWN", "server is not initialized yet")

    async def ready_later() -> None:
        await asyncio.sleep(0.3)
        scripted.answers["Version"] = VERSION

    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(ready_later())
        cri = await connect(f"unix://{scripted.path}", timeout=Duration.from_seconds(30), metrics=metrics)
    async with cri:
        assert cri.version == VERSION


async def test_never_ready(scripted: Runtime) -> None:
    scripted.answers["Version"] = Refuse("UNKNOWN", "server is not initialized yet")
    err = await refused(f"unix://{scripted.path}", within=5)
    assert "not ready within 5s" in str(err)
    assert "not initialized yet" in str(err)


async def test_wrong_endpoint_is_a_value_error_too() -> None:
    err = await refused("tcp://localhost:1")
    assert isinstance(err, EndpointError)
    assert isinstance(err, ValueError)
    assert isinstance(err, CriError)


async def test_connecting_can_be_cancelled(folder: Path) -> None:
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


async def test_handshake_is_not_measured(cri: RuntimeConnection, registry: CollectorRegistry) -> None:
    assert (
        registry.get_sample_value("kubelet_runtime_operations_total", {"operation_type": "version"}) is None
    )
