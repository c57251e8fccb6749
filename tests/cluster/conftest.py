"""A real control plane for the session, namespaces and nodes of it for tests.

Where its programs are not to be had (see `pykubelet.devcluster.binaries`), the tests that want it
skip and say why. The first session on a machine builds them, which takes minutes and is said.
"""

import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest

from pykubelet.devcluster.binaries import Binaries, find_programs
from pykubelet.devcluster.cluster import START_TIMEOUT, DevCluster, new_settings
from pykubelet.devcluster.layout import DevClusterError, Layout, NotAvailable
from pykubelet.devcluster.reference_kubelet import undo_host_changes
from tests.support.cluster_node import ClusterNode, cluster_node, in_cluster
from tests.support.data_dir import short_dir
from tests.support.plane import Plane, unique
from tests.support.pressure_table import VICTIMS, scenario_properties, victims
from tests.support.runtime import RunningRuntime, runtime_process


@pytest.fixture(scope="session")
def programs(pytestconfig: pytest.Config) -> Binaries:
    """The control plane's programs."""
    capturing = pytestconfig.pluginmanager.getplugin("capturemanager")

    def say(text: str) -> None:
        with capturing.global_and_fixture_disabled():
            print(f"\n{text}", file=sys.stderr, flush=True)

    try:
        return find_programs(say)
    except NotAvailable as err:
        pytest.skip(str(err))


@contextmanager
def running_plane(
    programs: Binaries, *, timeout: float = START_TIMEOUT, **changes: object
) -> Iterator[Plane]:
    """A control plane of one's own, for tests that must change its settings (see `Settings`).

    `timeout` is the time limit of its start in seconds.
    """
    try:
        settings = new_settings()
    except DevClusterError as err:
        pytest.skip(str(err))
    settings = msgspec.structs.replace(settings, audit=True, durable=False, **changes)
    with tempfile.TemporaryDirectory(prefix="pykc-", dir="/tmp") as folder:
        cluster = DevCluster(Layout.at(Path(folder)), settings, programs, owned=True)
        cluster.prepare()
        try:
            cluster.start(timeout)
            plane = Plane(cluster)
            yield plane
            plane.check()
        finally:
            cluster.stop(grace=0)


@pytest.fixture(scope="session")
def plane(programs: Binaries) -> Iterator[Plane]:
    """The session's control plane."""
    with running_plane(programs) as running:
        yield running


@pytest.fixture
def namespace(plane: Plane) -> Iterator[str]:
    """A namespace of the test's own, in which pods can be created; it is deleted at the end."""
    with fresh_namespace(plane) as name:
        yield name


@contextmanager
def fresh_namespace(plane: Plane, name: str = "", *, seconds: float = 90) -> Iterator[str]:
    """A new namespace for the time of a block; its pods are gone from the API at the end.

    `seconds` is the time limit of the cluster's controllers.
    """
    name = name or unique("t")
    plane.create({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name}})
    try:
        # After an outage the cluster's controllers come back late.
        plane.wait_for("serviceaccount", "default", name, seconds=seconds)
        plane.wait_for("configmap", "kube-root-ca.crt", name, seconds=seconds)
        yield name
    finally:
        # First of all, or their owners would make them anew.
        plane.delete("namespace", name)
        # Without an agent nobody else would finish them, and the namespace would stay forever.
        for pod in plane.items("pod", name):
            plane.delete("pod", pod["metadata"]["name"], name, grace=0)


@pytest.fixture(autouse=True)
def pressure_record(request: pytest.FixtureRequest) -> Iterator[None]:
    """Record the pods that a test of node pressure has evicted, for the table of `make pressure`."""
    if request.node.get_closest_marker("pressure") is None:
        yield
        return
    request.node.user_properties.extend(scenario_properties(request.node).items())
    # Requested here, so that the namespace is deleted afterwards.
    plane, namespace = request.getfixturevalue("plane"), request.getfixturevalue("namespace")
    yield
    found = ", ".join(victims(plane.items("event", namespace)))
    request.node.user_properties.append((VICTIMS, found))


@pytest.fixture(scope="module")
def runtime() -> Iterator[RunningRuntime]:
    """A private runtime that outlives the module's agents."""
    with short_dir() as path, runtime_process(path) as started:
        yield started


@pytest.fixture
def make_node(plane: Plane, runtime: RunningRuntime) -> Iterator[Callable[..., ClusterNode]]:
    """Make nodes, not yet started, that are gone at the end: see `cluster_node` for the arguments.

    One agent at a time may run: each takes everything in the runtime for its own.
    """
    with ExitStack() as stack:

        def make(**arguments: Any) -> ClusterNode:
            return stack.enter_context(in_cluster(cluster_node(plane, runtime, **arguments), start=False))

        yield make


@pytest.fixture(params=["ours", pytest.param("upstream", marks=pytest.mark.pressure)])
def kubelet_program(request: pytest.FixtureRequest, plane: Plane) -> Iterator[Path | None]:
    """Return what `cluster_node` takes as `program`: for our kubelet, then for the upstream one."""
    if request.param == "upstream" and plane.reference_kubelet is None:
        pytest.skip("there is no reference kubelet in $KUBEBUILDER_ASSETS")
    with undo_host_changes():
        yield plane.reference_kubelet if request.param == "upstream" else None


@pytest.fixture
def start_node(
    kubelet_program: Path | None, make_node: Callable[..., ClusterNode]
) -> Callable[[dict[str, Any]], ClusterNode]:
    """Start a node of either kubelet with these fields of KubeletConfiguration: both must behave alike."""

    def start(settings: dict[str, Any]) -> ClusterNode:
        node = make_node(program=kubelet_program, settings=settings)
        node.start()
        node.wait_registered()
        return node

    return start


@pytest.fixture(scope="module")
def cluster_member(plane: Plane, runtime: RunningRuntime) -> Iterator[ClusterNode]:
    """The module's node, registered and Ready."""
    with in_cluster(cluster_node(plane, runtime)) as node:
        yield node
