"""`pykubelet top`, `ps -o wide` and `describe` against a real node with a pod that works."""

import asyncio
import json
import re
from asyncio.subprocess import PIPE
from collections.abc import Iterator

import pytest

from tests.support.cli_node import command, environment, pykubelet
from tests.support.data_dir import short_dir
from tests.support.manifests import container, pod
from tests.support.node import Node, running, up_node

MI = 1 << 20
WORK = "dd if=/dev/zero of=/m/f bs=1M count=16; dd if=/dev/zero of=/f bs=1M count=4; while :; do :; done"


@pytest.fixture(scope="module")
def node() -> Iterator[Node]:
    """`pykubelet up` with a pod that has limits and works, and one that waits."""
    with short_dir() as path, running(up_node(path)) as started:
        worker = container(
            command=["sh", "-c", WORK],
            volumeMounts=[{"name": "m", "mountPath": "/m"}],
            resources={"requests": {"memory": "32Mi"}, "limits": {"cpu": "200m", "memory": "64Mi"}},
        )
        volume = {"name": "m", "emptyDir": {"medium": "Memory"}}
        started.write(pod("worker", worker, volumes=[volume]))
        started.write(pod("idle"))
        started.wait_ready("worker-n1")
        started.wait_ready("idle-n1")
        yield started
        started.clear()


@pytest.mark.machine
async def test_pykubelet_top_working_pod_is_measured(node: Node) -> None:
    async with asyncio.timeout(50):
        while True:
            ran = await pykubelet(node.instance, "top")
            if ran.code == 0 and re.search(
                r"^worker-n1 +default +1[5-9][0-9]m|^worker-n1 +default +2[0-4][0-9]m", ran.out, re.MULTILINE
            ):
                break
            # Until there are samples the command fails, with a reason.
            assert ran.code == 0 or re.search(r"measured yet|cannot report statistics", ran.err), ran
            await asyncio.sleep(0.5)
    heading, first, second = (line.split() for line in ran.out.splitlines())
    cells = dict(zip(heading, first, strict=True))
    assert int(cells["CPU/LIMIT"].rstrip("%")) in range(70, 130)
    assert int(cells["MEMORY(bytes)"].removesuffix("Mi")) in range(16, 65)
    assert int(cells["MEMORY/LIMIT"].rstrip("%")) in range(25, 101)
    assert second[0] == "idle-n1"

    document = json.loads((await pykubelet(node.instance, "top", "worker", "-o", "json")).out)
    (stats,) = document["pods"]
    assert stats["memory"]["workingSetBytes"] >= 16 * MI
    assert [found["name"] for found in stats["containers"]] == ["main"]
    (row,) = (await pykubelet(node.instance, "top", "worker")).out.splitlines()[1:]
    assert row.startswith("main ")
    node_row = (await pykubelet(node.instance, "top", "--node")).out.splitlines()[1].split()
    assert node_row[0] == "n1"

    wide = (await pykubelet(node.instance, "ps", "-o", "wide")).out
    assert re.search(r"^worker-n1 .* [0-9]+m +[0-9]+Mi$", wide, re.MULTILINE), wide
    # A container may have its second sample after its pod.
    line = re.compile(r"^    CPU: +[0-9]+m \([0-9]+% of the request 200m, [0-9]+% of the limit 200m\)$", re.M)
    async with asyncio.timeout(30):
        while line.search((await pykubelet(node.instance, "describe", "worker")).out) is None:
            await asyncio.sleep(0.5)


@pytest.mark.machine
async def test_pykubelet_top_ephemeral_storage_of_writable_layer_is_shown(node: Node) -> None:
    async with asyncio.timeout(50):
        while True:
            ran = await pykubelet(node.instance, "top", "worker", "-o", "json")
            storage = json.loads(ran.out)["pods"][0].get("ephemeral-storage", {}) if ran.code == 0 else {}
            if storage.get("usedBytes", 0) >= 4 * MI:
                break
            await asyncio.sleep(0.5)
    heading, row = ((await pykubelet(node.instance, "top", "worker")).out).splitlines()
    assert re.fullmatch(
        r"[4-9](\.[0-9])?Mi", dict(zip(heading.split(), row.split(), strict=True))["EPHEMERAL"]
    )


@pytest.mark.machine
async def test_pykubelet_top_watch_survives_removed_pod_and_ends_on_interrupt(node: Node) -> None:
    node.write(pod("short"))
    node.wait_ready("short-n1")
    process = await asyncio.create_subprocess_exec(
        *command(node.instance, "top", "-w", "--interval", "1s"), stdout=PIPE, stderr=PIPE, env=environment()
    )
    assert process.stdout is not None
    try:
        async with asyncio.timeout(50):
            while not (await process.stdout.readline()).startswith(b"short-n1 "):
                assert process.returncode is None
            node.remove("short")
            names = [b"short-n1"]
            while b"short-n1" in names:
                names = []
                while line := (await process.stdout.readline()).strip():
                    names.append(line.split()[0])
            process.send_signal(2)
            _, err = await process.communicate()
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    assert (process.returncode, err) == (130, b"")
