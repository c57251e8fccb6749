"""Cgroups of a test on the host's hierarchies, and processes in them."""

import asyncio
import os
import secrets
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from pykubelet.linux import cgroupfs as cgroup_tree
from pykubelet.linux.cgroupfs import detect_cgroups
from tests.support.pod_resources import amounts

CAPACITY = amounts(cpu="2", memory="24682416Ki", pid="32768")
NO_LIMIT = str(2**63 - 4096)
needs_v1 = pytest.mark.skipif(
    os.geteuid() != 0 or detect_cgroups().unified or bool(detect_cgroups().missing),
    reason="needs root and cgroup v1",
)


@pytest.fixture
def root() -> Iterator[str]:
    """A cgroup of our own, gone afterwards in every hierarchy."""
    name = f"pyk-test-{secrets.token_hex(4)}"
    try:
        yield f"/{name}"
    finally:
        for tree in cgroup_tree.find_trees(name):
            assert asyncio.run(_drop(tree)), f"{tree} stays"


async def _drop(tree: Path) -> bool:
    await cgroup_tree.kill_members(tree)
    return await cgroup_tree.remove(tree)


def value(controller: str, cgroup: str, file: str) -> str:
    return (detect_cgroups().path(controller, cgroup) / file).read_text().strip()


@contextmanager
def process_in(cgroup: str, *command: str) -> Iterator[subprocess.Popen[bytes]]:
    """A process that sits in a cgroup of every hierarchy."""
    with subprocess.Popen(command or ("sleep", "300")) as process:
        try:
            for controller in detect_cgroups().mounts:
                procs = detect_cgroups().path(controller, cgroup) / "cgroup.procs"
                if controller != "devices" or procs.exists():
                    procs.write_text(str(process.pid))
            yield process
        finally:
            process.kill()
