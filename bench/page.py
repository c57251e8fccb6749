"""What the page costs: closed and open, next to the same node without it in the same run (six minutes)."""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
import urllib.request
from collections.abc import AsyncIterator

from bench.node import Node, data_dir, running_node
from bench.processes import Cost, cost_over
from bench.results import Result
from pykubelet.standalone.instance import Instance
from pykubelet.standalone.seed_images import BUSYBOX_IMAGE

_PORT = 10394
_SETTLE_SECONDS = 15.0
_START_SECONDS = 120.0
_VIEWS = ("node", "pods")
"""Views that are watched at the same time, by one client each."""


def page(pods: int, seconds: float) -> list[Result]:
    """Measure a node with so many pods: without the page, with the page closed, and with it open."""
    # The node without the page is measured before and after: these machines are not equally quick.
    before = _measure(pods, seconds, 0)["none"]
    costs = _measure(pods, seconds, _PORT)
    after = _measure(pods, seconds, 0)["none"]
    base_cpu = (before.cpu_percent + after.cpu_percent) / 2
    base_pss = (before.pss_mb + after.pss_mb) / 2
    closed, opened = costs["closed"], costs["open"]
    title = f"page with {pods} pods"
    return [
        Result(f"{title}, closed: additional processor", closed.cpu_percent - base_cpu, "% of core", 0.1),
        Result(f"{title}, closed: additional memory (PSS)", closed.pss_mb - base_pss, "MB", 3),
        Result(f"{title}, open: additional processor", opened.cpu_percent - base_cpu, "% of core", 10),
        Result(f"{title}, open: additional memory (PSS)", opened.pss_mb - base_pss, "MB", 10),
    ]


def _measure(pods: int, seconds: float, port: int) -> dict[str, Cost]:
    """Measure a node with its page on a port (0: none), closed and, if it has one, open."""
    with data_dir() as path, running_node(path, extra=(f"--page-port={port}",)) as node:
        for number in range(pods):
            manifest = _pod(f"held-{number}")
            (Instance.at(path).manifests / f"{number}.json").write_text(json.dumps(manifest))
        _wait_running(node, pods)
        cost_over(node.pid, _SETTLE_SECONDS)
        costs = {"closed" if port else "none": cost_over(node.pid, seconds)}
        if port:
            costs["open"] = asyncio.run(_watched(node.pid, seconds))
    for name, cost in costs.items():
        print(
            f"     page {name}: processor {cost.cpu_percent:.3f} % of a core, memory {cost.pss_mb:.1f} MB",
            flush=True,
        )
    return costs


def _pod(name: str) -> dict[str, object]:
    container = {"name": "main", "image": BUSYBOX_IMAGE, "command": ["sleep", "3600"]}
    spec = {"containers": [container], "terminationGracePeriodSeconds": 1}
    return {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": name}, "spec": spec}


def _wait_running(node: Node, pods: int) -> None:
    deadline = time.monotonic() + _START_SECONDS
    while time.monotonic() < deadline:
        with urllib.request.urlopen(f"http://127.0.0.1:{node.read_only_port}/pods", timeout=10) as answer:
            items = json.load(answer)["items"]
        if sum(item["status"].get("phase") == "Running" for item in items) == pods:
            return
        time.sleep(0.2)
    raise RuntimeError(f"not all of {pods} pods run after {_START_SECONDS:.0f} s")


async def _watched(pid: int, seconds: float) -> Cost:
    """Measure while clients watch the page."""
    async with contextlib.AsyncExitStack() as stack:
        for view in _VIEWS:
            await stack.enter_async_context(_client(view))
        return await asyncio.to_thread(cost_over, pid, seconds)


@contextlib.asynccontextmanager
async def _client(view: str) -> AsyncIterator[None]:
    """Read the updates of a view while the context is open."""
    reader, writer = await asyncio.open_connection("127.0.0.1", _PORT)
    writer.write(f"GET /events?view={view} HTTP/1.1\r\nHost: localhost\r\n\r\n".encode())

    async def drain() -> None:
        while await reader.read(1 << 16):
            pass

    async with asyncio.TaskGroup() as tasks:
        task = tasks.create_task(drain())
        try:
            yield
        finally:
            task.cancel()
            writer.close()
