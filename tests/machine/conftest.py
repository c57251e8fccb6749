"""One node per module: a private runtime with an agent on it, and the proof that nothing is left."""

from collections.abc import Iterator

import pytest

from tests.support.data_dir import short_dir
from tests.support.node import Node, kubelet_node, running
from tests.support.runtime import RunningRuntime, runtime_process


@pytest.fixture(scope="module")
def runtime() -> Iterator[RunningRuntime]:
    """A private runtime that outlives the module's agents."""
    with short_dir() as path, runtime_process(path) as started:
        yield started


@pytest.fixture(scope="module")
def node(runtime: RunningRuntime) -> Iterator[Node]:
    """The module's node, whose pods are all gone at the end."""
    with running(kubelet_node(runtime, clusterDomain="cluster.local")) as started:
        yield started
        started.clear()
