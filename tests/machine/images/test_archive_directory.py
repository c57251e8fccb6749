"""Image archives in the manifest directory of a real node."""

from __future__ import annotations

import asyncio
import json
import os
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from pykubelet.images.archive_directory import RECORD_NAME
from pykubelet.images.pins import PinRecord
from pykubelet.standalone.requirements import inspect_host
from pykubelet.standalone.seed_images import (
    Entry,
    ImageConfig,
    busybox_entries,
    image_archive,
    machine_platform,
    read_static,
)
from tests.support.data_dir import short_dir
from tests.support.image_registry import layered_archive
from tests.support.images_cli import images
from tests.support.manifests import container, forever, pod
from tests.support.node import Node, kubelet_node
from tests.support.runtime import RunningRuntime, runtime_process
from tests.support.small_disk import MIB, fill_disk, leave_available, runtime_on_small_disk

pytestmark = pytest.mark.machine

NAME = "example.com/archived:1"


def busybox(name: str) -> bytes:
    """Return an archive of an image with a shell."""
    program = read_static(inspect_host().programs["busybox"])
    entries = [*busybox_entries(program, ["sh", "sleep"]), Entry("name", data=name.encode())]
    config = ImageConfig(env={"PATH": "/bin"})
    return image_archive(name, entries, config, machine_platform(os.uname().machine))


@pytest.fixture
def node() -> Iterator[Node]:
    """A node that has not started, and whose archives are removed at the end."""
    with short_dir() as path, runtime_process(path) as runtime:
        created = kubelet_node(runtime)
        try:
            yield created
        finally:
            created.stop()


def archives(node: Node) -> Path:
    path = node.manifests / "images"
    path.mkdir(exist_ok=True)
    return path


def imports(node: Node) -> list[str]:
    return re.findall(r'"Imported image archive" path="([^"]*)"', node.log_text())


def test_archive_directory_images_are_imported_once_and_pinned_while_the_file_exists(node: Node) -> None:
    path = archives(node) / "app.tar"
    path.write_bytes(busybox(NAME))
    (archives(node) / "broken.tar").write_bytes(busybox(NAME)[:100_000])
    node.write(pod("early", container(image=NAME, command=forever(), imagePullPolicy="Never")))
    node.start()
    node.wait_ready("early-n1")
    assert [event for event in node.events("early-n1") if event[1] == "ErrImageNeverPull"] == []
    pins = PinRecord(node.root)
    assert pins.names() == {NAME}
    warnings = [line for line in node.log_text().splitlines() if "Ignored image archive" in line]
    assert len(warnings) == 1
    assert "it is incomplete" in warnings[0]
    assert "is a folder" not in node.log_text()

    other = archives(node) / "later.tar"
    hidden = archives(node) / ".later.tar"
    hidden.write_bytes(busybox("example.com/later:1"))
    hidden.rename(other)
    node.wait("the second import", lambda: len(imports(node)) == 2)
    node.restart()
    node.wait("the record", (node.root / RECORD_NAME).exists)
    ran = asyncio.run(images(node.instance, "ls", "-o", "json"))
    pinned = {item["names"][0]: item["pinned"] for item in json.loads(ran.out)["items"]}
    assert pinned[NAME] is pinned["example.com/later:1"] is True

    other.unlink()
    node.wait("the pin to end", lambda: pins.names() == {NAME})
    assert imports(node) == [str(path), str(other)], "no archive is imported twice"
    for file in archives(node).iterdir():
        file.unlink()
    archives(node).rmdir()
    node.clear()


def test_load_full_disk_fails_in_one_line_and_succeeds_later(tmp_path: Path) -> None:
    path = tmp_path / "large.tar"
    path.write_bytes(layered_archive(NAME, [os.urandom(20 * MIB)]))
    with runtime_on_small_disk(200 * MIB) as runtime:
        disk = disk_of(runtime)
        for available, expected in {
            # The runtime may free a few blocks after the disk was filled.
            0: r"needs more than the \d[^ ]* K?i?B that are free",
            25: "no space left on device",
        }.items():
            if available:
                leave_available(disk, available * MIB)
            else:
                fill_disk(disk)
            ran = asyncio.run(images(runtime.instance, "load", str(path)))
            assert ran.code == 1
            *_, line = ran.err.splitlines()
            assert line.startswith("pykubelet images load: ")
            assert re.search(expected, line)
            leave_available(disk, 20 * MIB)
            assert PinRecord(runtime.instance.kubelet_root).names() == frozenset()
        leave_available(disk, 100 * MIB)
        ran = asyncio.run(images(runtime.instance, "load", str(path)))
        assert ran.code == 0, ran


def disk_of(runtime: RunningRuntime) -> Path:
    """Return the mount point of the runtime's disk."""
    return next(path for path in runtime.instance.data_dir.parents if path.is_mount())
