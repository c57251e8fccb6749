"""The same pods through the agent: N manifests dropped into the folder at once."""

from __future__ import annotations

import asyncio
import json
import statistics
import time
import urllib.request
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.floor import COMMAND, Times, connected
from bench.node import Node
from bench.processes import Cost, cost_over, cpu_seconds
from pykubelet.cri import runtime_pb2 as pb
from pykubelet.cri.connect import RuntimeConnection
from pykubelet.standalone.instance import Instance

LIMIT_SECONDS = 300.0


@dataclass(frozen=True, slots=True)
class AgentRun:
    """What the agent did and what it cost."""

    times: Times
    start_cpu: float
    stop_cpu: float
    held: Cost


async def measure_pods(node: Node, image: str, pods: int, hold_seconds: float) -> AgentRun:
    """Drop manifests, wait until all run, hold them, take them away."""
    instance = Instance.at(node.data_dir)
    async with await connected(instance.endpoint) as cri:
        before, began = cpu_seconds(node.pid), time.monotonic()
        _write(instance.manifests, image, pods)
        started = await _until_running(cri, pods, began)
        all_running = max(started)
        await asyncio.sleep(1)
        start_cpu = cpu_seconds(node.pid) - before
        _check_ready(node, pods)
        await asyncio.sleep(5)
        held = await asyncio.to_thread(cost_over, node.pid, hold_seconds)
        before, ending = cpu_seconds(node.pid), time.monotonic()
        for path in instance.manifests.iterdir():
            path.unlink()
        await _until_gone(cri, ending)
        deleted = time.monotonic() - ending
        stop_cpu = cpu_seconds(node.pid) - before
    return AgentRun(Times(all_running, statistics.median(started), deleted), start_cpu, stop_cpu, held)


async def start_and_stop(node: Node, image: str, pods: int, *, with_volumes: bool) -> Times:
    """Drop manifests, wait until all run, take them away."""
    instance = Instance.at(node.data_dir)
    async with await connected(instance.endpoint) as cri:
        began = time.monotonic()
        _write(instance.manifests, image, pods, with_volumes=with_volumes)
        started = await _until_running(cri, pods, began)
        await asyncio.sleep(2)
        _check_ready(node, pods)
        ending = time.monotonic()
        for path in instance.manifests.iterdir():
            path.unlink()
        await _until_gone(cri, ending)
        deleted = time.monotonic() - ending
        await asyncio.sleep(2)
    return Times(max(started), statistics.median(started), deleted)


def _write(folder: Path, image: str, pods: int, *, with_volumes: bool = False) -> None:
    for number in range(pods):
        name = f"bench-{number:03d}"
        pod = _pod(name, image)
        if with_volumes:
            _add_volumes(pod, name)
        document = (
            {"apiVersion": "v1", "kind": "List", "items": [*_objects(name), pod]} if with_volumes else pod
        )
        hidden = folder / f".{number}.json"
        hidden.touch(mode=0o600)
        hidden.write_text(json.dumps(document))
        hidden.rename(folder / f"{name}.json")


def _pod(name: str, image: str) -> dict[str, Any]:
    container = {"name": "main", "image": image, "imagePullPolicy": "IfNotPresent", "command": COMMAND}
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": name},
        "spec": {"terminationGracePeriodSeconds": 2, "containers": [container]},
    }


def _objects(name: str) -> list[dict[str, Any]]:
    data = {f"key-{number}": f"value {number} of {name}" for number in range(4)}
    return [
        {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": name}, "data": data},
        {"apiVersion": "v1", "kind": "Secret", "metadata": {"name": name}, "stringData": data},
    ]


def _add_volumes(pod: dict[str, Any], name: str) -> None:
    sources = [
        {"configMap": {"name": name, "items": [{"key": "key-0", "path": "a"}]}},
        {"secret": {"name": name, "items": [{"key": "key-1", "path": "b"}]}},
    ]
    volumes: dict[str, dict[str, Any]] = {
        "config": {"configMap": {"name": name}},
        "secret": {"secret": {"secretName": name}},
        "projected": {"projected": {"sources": sources}},
        "scratch": {"emptyDir": {}},
    }
    pod["spec"]["volumes"] = [{"name": kind, **volume} for kind, volume in volumes.items()]
    pod["spec"]["containers"][0]["volumeMounts"] = [
        {"name": kind, "mountPath": f"/volumes/{kind}"} for kind in volumes
    ]


async def _until_running(cri: RuntimeConnection, pods: int, began: float) -> list[float]:
    running = pb.ContainerFilter(state=pb.ContainerStateValue(state=pb.CONTAINER_RUNNING))
    seen: dict[str, float] = {}
    while len(seen) < pods:
        now = time.monotonic() - began
        if now > LIMIT_SECONDS:
            raise RuntimeError(f"only {len(seen)} of {pods} pods run after {LIMIT_SECONDS:.0f} s")
        for container in await cri.runtime.list_containers(running):
            seen.setdefault(container.id, now)
        await asyncio.sleep(0.05)
    return list(seen.values())


async def _until_gone(cri: RuntimeConnection, began: float) -> None:
    while await cri.runtime.list_pod_sandbox():
        if time.monotonic() - began > LIMIT_SECONDS:
            raise RuntimeError("the pods were not removed")
        await asyncio.sleep(0.1)


def _check_ready(node: Node, pods: int) -> None:
    with urllib.request.urlopen(f"http://127.0.0.1:{node.read_only_port}/pods", timeout=10) as answer:
        items = json.load(answer)["items"]
    phases = [item["status"].get("phase") for item in items]
    if phases.count("Running") != pods:
        raise RuntimeError(f"the agent reports {phases.count('Running')} of {pods} pods as Running")
