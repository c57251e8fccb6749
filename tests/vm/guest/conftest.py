"""A node in the virtual machine, with either cgroup driver; elsewhere these tests are skipped."""

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.data_dir import short_dir
from tests.support.node import running
from tests.vm.guest.node import GuestNode, guest_node
from tests.vm.machine import MARKER


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if os.environ.get(MARKER) != "v2":
        for item in items:
            if Path(__file__).parent in item.path.parents:
                item.add_marker(pytest.mark.skip(reason="runs in a virtual machine: make vmtest"))


@pytest.fixture(scope="session")
def swap() -> Iterator[None]:
    """16 MB of swap."""
    subprocess.run(["mkswap", "/dev/ram0"], check=True, capture_output=True)
    subprocess.run(["swapon", "/dev/ram0"], check=True, capture_output=True)
    yield
    subprocess.run(["swapoff", "/dev/ram0"], check=True, capture_output=True)


@pytest.fixture(scope="module", params=["systemd", "cgroupfs"])
def node(request: pytest.FixtureRequest, swap: None) -> Iterator[GuestNode]:
    """A node with this driver in the agent and in the runtime, whose end leaves nothing."""
    with short_dir() as path, guest_node(path, request.param) as made, running(made):
        yield made
