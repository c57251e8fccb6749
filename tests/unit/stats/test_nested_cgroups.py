"""Search for nested cgroups: what is found and sampled, its limits, and cgroups that come and go."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import pytest

from pykubelet.agent.stats import GlobalHousekeeping
from pykubelet.stats.cgroups.search import MAX_IN_TOTAL, MAX_NESTED, MAX_PATH, find_nested
from pykubelet.stats.collector import NESTED, NODE, Collector
from pykubelet.stats.samples import Target
from pykubelet.util.tasks import TaskScope
from tests.unit.stats.test_composition import UsageReader

BOX = "/kubepods/podu1/box"


def tree(root: Path, *paths: str) -> str:
    for path in paths:
        (root / path.lstrip("/")).mkdir(parents=True, exist_ok=True)
    return str(root)


def test_find_nested_cgroups_below_parents_returned(tmp_path: Path) -> None:
    root = tree(tmp_path, f"{BOX}/init.scope", f"{BOX}/a/b", "/kubepods/podu1/other", "/kubepods/podu2/c/d")
    (tmp_path / "kubepods/podu1/box/cgroup.procs").write_text("1\n")
    assert find_nested(root, [BOX], {BOX}) == [f"{BOX}/a", f"{BOX}/a/b", f"{BOX}/init.scope"]
    assert find_nested(root, ["/kubepods/podu2/c", BOX], {f"{BOX}/a"}) == [
        f"{BOX}/init.scope",
        "/kubepods/podu2/c/d",
    ]


def test_find_nested_mounts_links_and_missing_cgroups_omitted(tmp_path: Path) -> None:
    root = tree(tmp_path, f"{BOX}/proc.mount/a")
    (tmp_path / "kubepods/podu1/box/link").symlink_to("/")
    assert find_nested(root, [BOX, "/gone"], set()) == []


def test_find_nested_number_and_length_of_paths_limited(tmp_path: Path) -> None:
    boxes = [f"/pod{number}" for number in range(MAX_IN_TOTAL // MAX_NESTED + 2)]
    root = tree(tmp_path, *(f"{box}/{number}" for box in boxes for number in range(MAX_NESTED + 5)))
    found = find_nested(root, boxes, set())
    assert len(found) == MAX_IN_TOTAL
    assert len([path for path in found if path.startswith("/pod0/")]) == MAX_NESTED
    deep = tmp_path / "deep"
    deep.mkdir()
    for _ in range(8):
        deep /= "n" * 200
        deep.mkdir()
    found = find_nested(root, ["/deep"], set())
    assert found
    assert max(map(len, found)) <= MAX_PATH


def test_find_nested_directory_without_subdirectories_not_listed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = tree(tmp_path, BOX)
    if (tmp_path / BOX.lstrip("/")).stat().st_nlink != 2:
        pytest.skip("the file system of the test does not count directories as links")
    monkeypatch.setattr(os, "scandir", None)
    assert find_nested(root, [BOX], set()) == []


class Node:
    """A collector with one container and a system cgroup, and the search below them."""

    def __init__(self, root: Path, tasks: TaskScope, interval: float = 60.0) -> None:
        self.root = root
        self.collector = Collector(UsageReader, tasks)  # type: ignore[arg-type]
        self.collector.set_targets(
            NODE,
            [
                Target(path="/", kind="root"),
                Target(path="/kubepods", kind="node"),
                Target(path="/kubelet", kind="node"),
            ],
        )
        self.collector.set_targets(
            "u1",
            [Target(path=BOX, kind="container", pod_uid="u1", container="a")],
        )
        self.housekeeping = GlobalHousekeeping(self.collector, root, ("/kubepods",), interval)

    def nested(self) -> list[Target]:
        return sorted(self.collector.targets_of(NESTED), key=lambda target: target.path)


async def test_global_housekeeping_nested_cgroups_sampled_without_labels(
    tmp_path: Path, tasks: TaskScope
) -> None:
    node = Node(tmp_path, tasks)
    tree(tmp_path, f"{BOX}/a", "/kubelet/worker", "/kubepods/podu1/unknown", "/unrelated")
    await node.housekeeping.search()
    await node.housekeeping.search()
    assert node.nested() == [
        Target(path="/kubelet/worker", kind="node"),
        Target(path=f"{BOX}/a", kind="node"),
    ]
    node.collector.sample_now([f"{BOX}/a"])
    record = node.collector.record(f"{BOX}/a")
    assert record is not None
    assert record.usage is not None
    # An OOM kill in it is one of the container's pod.
    target = node.collector.find_target(f"{BOX}/a/deeper")
    assert target is not None
    assert target.pod_uid == "u1"


async def test_global_housekeeping_removed_cgroup_and_container_dropped(
    tmp_path: Path, tasks: TaskScope
) -> None:
    node = Node(tmp_path, tasks)
    tree(tmp_path, f"{BOX}/a", "/kubelet/worker")
    await node.housekeeping.search()
    (tmp_path / "kubelet/worker").rmdir()
    await node.housekeeping.search()
    assert [target.path for target in node.nested()] == [f"{BOX}/a"]
    node.collector.set_targets("u1", ())
    await node.housekeeping.search()
    assert node.nested() == []
    assert {target.path for target in node.collector.targets()} == {"/", "/kubepods", "/kubelet"}


async def test_global_housekeeping_pods_below_system_cgroup_not_searched(
    tmp_path: Path, tasks: TaskScope
) -> None:
    node = Node(tmp_path, tasks)
    tree(tmp_path, "/kubelet/kubepods/podu9/x", "/kubelet/b")
    housekeeping = GlobalHousekeeping(node.collector, tmp_path, ("/kubelet/kubepods",), 60.0)
    await housekeeping.search()
    assert [target.path for target in node.nested()] == ["/kubelet/b"]


@pytest.mark.looptime
async def test_global_housekeeping_interval_between_searches(tmp_path: Path, tasks: TaskScope) -> None:
    node = Node(tmp_path, tasks, interval=30.0)
    tree(tmp_path, f"{BOX}/a")
    running = asyncio.ensure_future(node.housekeeping.run())
    await asyncio.sleep(29)
    assert node.nested() == []
    await asyncio.sleep(2)
    assert len(node.nested()) == 1
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
