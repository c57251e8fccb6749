"""`pykubelet images` against a real node with a real registry."""

from __future__ import annotations

import asyncio
import gzip
import json
import os
import signal
import subprocess
import tarfile
from collections.abc import AsyncIterator, Iterator
from contextlib import suppress
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry

from pykubelet.api.duration import Duration
from pykubelet.cri import runtime_pb2 as pb
from pykubelet.cri.channel import CriMetrics
from pykubelet.cri.connect import RuntimeConnection, connect
from pykubelet.cri.containerd_store import PINNED, PINNED_LABEL, ContainerdStore
from pykubelet.images.pins import PinRecord
from pykubelet.standalone.seed_images import BUSYBOX_IMAGE
from tests.support.cli_node import Terminal
from tests.support.image_registry import Registry, layered_archive, running_registry
from tests.support.images_cli import images, images_command, started
from tests.support.manifests import container, pod
from tests.support.node import Node
from tests.support.slow_registry import slow_proxy

pytestmark = pytest.mark.machine

MIB = 1024 * 1024


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Registry]:
    with running_registry(tmp_path_factory.mktemp("registry")) as registry:
        yield registry


@pytest.fixture
async def cri(node: Node) -> AsyncIterator[RuntimeConnection]:
    """The node's runtime; images that a test brings are removed."""
    metrics = CriMetrics(CollectorRegistry())
    endpoint = node.instance.endpoint
    async with await connect(endpoint, timeout=Duration.from_seconds(60), metrics=metrics) as client:
        yield client
        for image in await client.images.list_images():
            if not any(name.startswith("pykubelet.local/") for name in image.repo_tags):
                await client.images.remove_image(pb.ImageSpec(image=image.id))
    pins = PinRecord(node.instance.kubelet_root)
    pins.remove(pins.names())


async def test_images_pull_list_and_remove_agree_with_the_runtime(
    node: Node, cri: RuntimeConnection, source: Registry
) -> None:
    digest = source.push("team/app", "1")
    name = f"{source.host}/team/app:1"
    ran = await images(node.instance, "pull", name)
    assert ran.code == 0, ran
    assert ran.out.startswith(f"Pulled {name} (")

    node.write(pod("user", container()))
    node.wait_ready("user-n1")
    ran = await images(node.instance, "ls", "-o", "json")
    found = {item["names"][0]: item for item in json.loads(ran.out)["items"]}
    assert found[name]["digests"] == [f"{source.host}/team/app@{digest}"]
    assert (found[name]["pinned"], found[name]["pods"]) == (False, [])
    assert (found[BUSYBOX_IMAGE]["pinned"], found[BUSYBOX_IMAGE]["pods"]) == (True, ["default/user-n1"])
    heading, *rows = (await images(node.instance, "ls")).out.splitlines()
    assert heading.split() == ["IMAGE", "ID", "SIZE", "PINNED", "PODS", "LAST", "USED", "AGE"]
    [row] = [row.split() for row in rows if row.startswith(name)]
    assert row[1] == found[name]["id"].removeprefix("sha256:")[:12]
    assert digest in (await images(node.instance, "ls", "-o", "wide", name)).out
    assert (await images(node.instance, "ls", "-o", "name", row[1])).out == f"{name}\n"

    ran = await images(node.instance, "rm", BUSYBOX_IMAGE, name)
    assert ran.code == 1
    assert "used by default/user-n1; --force" in ran.err
    assert f"Removed {name}" in ran.out
    assert not (await cri.images.image_status(pb.ImageSpec(image=name))).HasField("image")
    node.clear()
    ran = await images(node.instance, "ls", "nothing")
    assert (ran.code, ran.err) == (
        1,
        "pykubelet images ls: there is no image 'nothing': see `pykubelet images ls`\n",
    )


async def test_images_pull_failures_are_one_line(
    node: Node, cri: RuntimeConnection, source: Registry
) -> None:
    for image, expected in {
        f"{source.host}/team/none:1": "not found",
        "a/UPPER:1": "must be lowercase",
        "127.0.0.1:1/app:1": "connection refused",
    }.items():
        ran = await images(node.instance, "pull", image)
        assert ran.code == 1
        *_, line = ran.err.splitlines()
        assert line.startswith("pykubelet images pull: ")
        assert expected in line


async def test_images_pull_slow_registry_shows_progress_and_stops_on_ctrl_c(
    node: Node, cri: RuntimeConnection, source: Registry
) -> None:
    source.push_layers("slow", "1", [os.urandom(3 * MIB), os.urandom(MIB)])
    async with slow_proxy(source.host, MIB / 2) as proxy:
        name = f"{proxy.host}/slow:1"
        terminal = Terminal(images_command(node.instance, "pull", name))
        await terminal.until("of 2 layers")
        await terminal.until("MiB")
        terminal.type("\x03")
        await terminal.until("stopped; the next pull continues")
        assert await terminal.end() == 130
        assert b"\x1b[?25h" in terminal.said.partition(b"stopped")[0], "the cursor is shown again"
        assert b"Traceback" not in terminal.said
        proxy.rate = 100 * MIB
        ran = await images(node.instance, "pull", name)
        assert ran.code == 0, ran

        proxy.rate = 0
        async with started(node.instance, "pull", f"{proxy.host}/other:1") as process:
            assert process.stderr is not None
            while b"Pulling" not in await process.stderr.readline():
                pass
            process.send_signal(signal.SIGINT)
            async with asyncio.timeout(20):
                assert await process.wait() == 130


@pytest.mark.parametrize("form", ["oci", "gzip", "stdin", "docker"])
async def test_images_load_pins_and_save_writes_an_equal_archive(
    node: Node, cri: RuntimeConnection, tmp_path: Path, form: str
) -> None:
    name = f"example.com/loaded/{form}:1"
    archive = layered_archive(name, [os.urandom(1000), form.encode()])
    path = tmp_path / "image.tar"
    if form == "docker":
        path.write_bytes(docker_archive(tmp_path, archive, name))
    else:
        path.write_bytes(gzip.compress(archive) if form == "gzip" else archive)
    given = ("-", path.read_bytes()) if form == "stdin" else (str(path), b"")
    ran = await images(node.instance, "load", given[0], stdin=given[1])
    assert ran.code == 0, ran
    assert ran.out.startswith(f"Loaded {name} (sha256:")
    before = (await cri.images.image_status(pb.ImageSpec(image=name))).image
    assert PinRecord(node.instance.kubelet_root).names() == {name}
    [record] = await ContainerdStore(cri.image_channel).list_images([name])
    assert record.labels[PINNED_LABEL] == PINNED

    saved = tmp_path / "saved.tar"
    ran = await images(node.instance, "save", name, "-o", str(saved))
    assert ran.code == 0, ran
    assert sorted(found.name for found in tmp_path.iterdir() if "saved" in found.name) == ["saved.tar"]
    with tarfile.open(saved) as tar:
        assert "index.json" in tar.getnames()
    refused = await images(node.instance, "save", name, "-o", str(saved))
    assert "exists: give --force" in refused.err

    refused = await images(node.instance, "rm", name)
    assert "it is pinned" in refused.err
    assert (await images(node.instance, "unpin", name)).out == f"{name} unpinned\n"
    assert (await images(node.instance, "rm", name)).code == 0
    ran = await images(node.instance, "load", str(saved))
    assert ran.code == 0, ran
    assert (await cri.images.image_status(pb.ImageSpec(image=name))).image.id == before.id


def docker_archive(directory: Path, archive: bytes, name: str) -> bytes:
    """Return an OCI archive in the older format of `docker save`."""
    oci, docker = directory / "oci", directory / "docker"
    docker.mkdir()
    (directory / "oci.tar").write_bytes(archive)
    subprocess.run(
        ["sh", "-c", f"mkdir {oci} && tar -xf {directory}/oci.tar -C {oci}"], check=True, capture_output=True
    )
    index = json.loads((oci / "index.json").read_bytes())
    manifest = json.loads((oci / "blobs" / index["manifests"][0]["digest"].replace(":", "/")).read_bytes())
    layers = []
    for number, layer in enumerate(manifest["layers"]):
        (docker / f"layer{number}").mkdir()
        blob = oci / "blobs" / layer["digest"].replace(":", "/")
        (docker / f"layer{number}" / "layer.tar").write_bytes(blob.read_bytes())
        layers.append(f"layer{number}/layer.tar")
    (docker / "config.json").write_bytes(
        (oci / "blobs" / manifest["config"]["digest"].replace(":", "/")).read_bytes()
    )
    entry = {"Config": "config.json", "RepoTags": [name], "Layers": layers}
    (docker / "manifest.json").write_text(json.dumps([entry]))
    subprocess.run(["tar", "-cf", str(directory / "docker.tar"), "-C", str(docker), "."], check=True)
    return (directory / "docker.tar").read_bytes()


async def test_images_load_unusable_archive_is_one_line_and_pins_nothing(
    node: Node, cri: RuntimeConnection, tmp_path: Path
) -> None:
    name = "example.com/damaged:1"
    archive = layered_archive(name, [os.urandom(100_000)])
    path = tmp_path / "image.tar"
    for content, expected in {
        archive[:60_000]: "ends in the middle of a file: it is incomplete",
        archive.replace(archive[30_000:30_010], b"damaged!!!"): "is damaged: the content of blobs/sha256/",
        b"no archive": "ends too early",
    }.items():
        path.write_bytes(content)
        ran = await images(node.instance, "load", str(path))
        assert ran.code == 1
        assert expected in ran.err
        assert len([line for line in ran.err.splitlines() if line.startswith("pykubelet")]) == 1
    for missing in (str(tmp_path / "none"), str(tmp_path)):
        ran = await images(node.instance, "load", missing)
        assert (ran.code, ran.err.count("\n")) == (1, 1)
    assert PinRecord(node.instance.kubelet_root).names() == frozenset()
    assert not (await cri.images.image_status(pb.ImageSpec(image=name))).HasField("image")


async def test_images_load_interrupted_leaves_nothing(
    node: Node, cri: RuntimeConnection, tmp_path: Path
) -> None:
    name = "example.com/interrupted:1"
    path = tmp_path / "image.tar"
    path.write_bytes(layered_archive(name, [os.urandom(MIB) for _ in range(60)]))
    before = PinRecord(node.instance.kubelet_root).names()
    async with started(node.instance, "load", str(path)) as process:
        assert process.stderr is not None
        while b"Importing" not in await process.stderr.readline():
            pass
        process.send_signal(signal.SIGINT)
        async with asyncio.timeout(20):
            assert await process.wait() == 130
        assert b"Traceback" not in await process.stderr.read()
    assert PinRecord(node.instance.kubelet_root).names() == before
    ran = await images(node.instance, "load", str(path))
    assert ran.code == 0, ran


async def test_images_prune_removes_by_the_rules_of_garbage_collection(
    node: Node, cri: RuntimeConnection, source: Registry
) -> None:
    for tag in ("young", "pinned"):
        source.push("pruned", tag, note=tag)
        assert (await images(node.instance, "pull", "-q", f"{source.host}/pruned:{tag}")).code == 0
    ran = await images(node.instance, "pin", f"{source.host}/pruned:pinned")
    assert ran.out == f"{source.host}/pruned:pinned pinned\n"
    ran = await images(node.instance, "prune", "--dry-run")
    assert ran.code == 0, ran
    assert "No unused images to remove\n1 unused image kept: seen for less than 2m0s" in ran.out
    assert (await cri.images.image_status(pb.ImageSpec(image=f"{source.host}/pruned:young"))).HasField(
        "image"
    )


async def test_images_commands_stopped_kubelet_work_except_prune(
    node: Node, cri: RuntimeConnection, source: Registry, tmp_path: Path
) -> None:
    source.push("offline", "1")
    name = f"{source.host}/offline:1"
    node.stop()
    try:
        assert (await images(node.instance, "pull", name)).code == 0
        assert (await images(node.instance, "pin", name)).code == 0
        assert name in (await images(node.instance, "ls")).out
        assert (await images(node.instance, "save", name, "-o", str(tmp_path / "x.tar"))).code == 0
        assert (await images(node.instance, "rm", "--force", name)).code == 0
        ran = await images(node.instance, "prune")
        assert (ran.code, ran.err.count("\n")) == (1, 1)
        assert "no node runs on" in ran.err or "starting, or stopping" in ran.err
    finally:
        node.start()


@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGTERM, 143), (signal.SIGHUP, 129), (signal.SIGINT, 130)]
)
async def test_images_save_ended_by_signal_leaves_neither_file_nor_ctr(
    node: Node,
    cri: RuntimeConnection,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    number: int,
    code: int,
) -> None:
    if signal.getsignal(number) is signal.SIG_IGN:
        pytest.skip("the signal is ignored here (nohup), and so by the commands that are started")
    programs, target = tmp_path / "bin", tmp_path / "out"
    programs.mkdir()
    target.mkdir()
    ctr = programs / "ctr"
    ctr.write_text(
        f'#!/bin/sh\necho part > "$5"\necho $$ > {tmp_path}/pid.new\n'
        f"mv {tmp_path}/pid.new {tmp_path}/pid\nexec sleep 600\n"
    )
    ctr.chmod(0o755)
    monkeypatch.setenv("PATH", str(programs), prepend=os.pathsep)
    async with started(node.instance, "save", BUSYBOX_IMAGE, "-o", str(target / "x.tar")) as process:
        async with asyncio.timeout(60):
            while not (tmp_path / "pid").exists():
                await asyncio.sleep(0.02)
        [partial] = target.iterdir()
        assert partial.read_text() == "part\n"
        process.send_signal(number)
        async with asyncio.timeout(30):
            assert await process.wait() == code
    assert list(target.iterdir()) == []
    assert not Path("/proc", (tmp_path / "pid").read_text().strip()).exists()


async def test_images_load_of_standard_input_ends_with_first_ctrl_c(node: Node) -> None:
    async with started(node.instance, "load", "-") as process:
        assert process.stdin is not None
        process.stdin.write(bytes(MIB))
        await process.stdin.drain()
        spool = str(node.instance.kubelet_root)
        async with asyncio.timeout(60):
            while not any(spool in link for link in open_files(process.pid)):
                await asyncio.sleep(0.02)
        process.send_signal(signal.SIGINT)
        async with asyncio.timeout(20):
            assert await process.wait() == 130


def open_files(pid: int) -> list[str]:
    """Return the paths of the open files of a process."""
    found = []
    for link in Path(f"/proc/{pid}/fd").iterdir():
        with suppress(FileNotFoundError):
            found.append(str(link.readlink()))
    return found
