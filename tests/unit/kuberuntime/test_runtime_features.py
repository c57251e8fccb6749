"""Features of runtimes by version and by their own report, also of one that is replaced under the kubelet."""

import tempfile
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry

from pykubelet.api.duration import Duration
from pykubelet.cri import runtime_pb2 as pb
from pykubelet.cri.channel import CriMetrics
from pykubelet.cri.connect import RuntimeConnection, connect
from pykubelet.kuberuntime.runtime_features import (
    CDI,
    IMAGE_VOLUMES,
    RuntimeFeatures,
    has_feature,
    missing_by_version,
)
from pykubelet.transport.errors import CriError
from tests.support.cri_servers import Refuse, Runtime

CONDITIONS = [pb.RuntimeCondition(type=name, status=True) for name in ("RuntimeReady", "NetworkReady")]
OLD_STATUS = pb.StatusResponse(status=pb.RuntimeStatus(conditions=CONDITIONS))
NEW_STATUS = pb.StatusResponse(
    status=pb.RuntimeStatus(conditions=CONDITIONS),
    runtime_handlers=[
        pb.RuntimeHandler(
            name="", features=pb.RuntimeHandlerFeatures(recursive_read_only_mounts=True, user_namespaces=True)
        ),
        pb.RuntimeHandler(name="gvisor"),
    ],
    features=pb.RuntimeFeatures(supplemental_groups_policy=True),
)
MISSING_IN_1_6 = [
    "CDI devices",
    "user namespaces",
    "recursive read-only mounts",
    "supplementalGroupsPolicy",
    "container checkpoints",
    "image volumes",
]


def version(number: str) -> pb.VersionResponse:
    return pb.VersionResponse(
        version="0.1.0", runtime_name="containerd", runtime_version=number, runtime_api_version="v1"
    )


@pytest.fixture
def socket() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="rf-", dir="/tmp") as directory:
        yield Path(directory) / "s"


@pytest.fixture
async def runtime(socket: Path) -> AsyncIterator[Runtime]:
    async with Runtime(socket, {"Version": version("1.6.20~ds1"), "Status": OLD_STATUS}) as started:
        yield started


@pytest.fixture
async def cri(runtime: Runtime) -> AsyncIterator[RuntimeConnection]:
    metrics = CriMetrics(CollectorRegistry())
    async with await connect(str(runtime.path), timeout=Duration.from_seconds(5), metrics=metrics) as made:
        yield made


@pytest.mark.parametrize(
    ("feature", "name", "number", "has"),
    [
        (CDI, "containerd", "1.6.20~ds1", False),
        (CDI, "containerd", "v1.7.0", True),
        (CDI, "containerd", "2.1.4", True),
        (CDI, "containerd", "unreadable", True),
        (CDI, "another", "0.1", True),
        (IMAGE_VOLUMES, "containerd", "1.6.20~ds1", False),
        (IMAGE_VOLUMES, "containerd", "v2.0.5", False),
        (IMAGE_VOLUMES, "containerd", "v2.1.0-rc.1", True),
        (IMAGE_VOLUMES, "containerd", "3.0.0", True),
        (IMAGE_VOLUMES, "cri-o", "1.30.2", False),
        (IMAGE_VOLUMES, "cri-o", "1.31.0", True),
        (IMAGE_VOLUMES, "containerd", "unknown", True),
    ],
)
def test_has_feature_runtime_version_returns_support(feature: str, name: str, number: str, has: bool) -> None:
    assert has_feature(feature, name, number) is has


def test_missing_by_version_lists_what_newer_ones_have() -> None:
    assert missing_by_version("containerd", "1.6.20~ds1") == MISSING_IN_1_6
    assert missing_by_version("containerd", "2.0.1") == ["image volumes"]
    assert missing_by_version("containerd", "2.4.2+unknown") == []


async def test_status_runtime_upgraded_features_follow_without_restart(
    runtime: Runtime, cri: RuntimeConnection
) -> None:
    features = RuntimeFeatures(cri)
    await features.status()
    assert features.missing() == MISSING_IN_1_6
    assert not features.has_image_volumes()
    assert not features.has_cdi()
    assert not features.has_user_namespaces("")
    await runtime.stop()
    with pytest.raises(CriError):
        await features.status()
    assert features.missing() == MISSING_IN_1_6
    runtime.answers = {"Version": version("2.4.2"), "Status": NEW_STATUS}
    await runtime.start()
    await features.status()
    assert features.version.runtime_version == "2.4.2"
    assert features.missing() == []
    assert features.has_image_volumes()
    assert features.has_cdi()
    assert (features.has_user_namespaces(""), features.has_user_namespaces("gvisor")) == (True, False)
    assert features.recursive_handlers() == {""}


async def test_status_version_call_fails_after_reconnect_is_retried(
    runtime: Runtime, cri: RuntimeConnection
) -> None:
    features = RuntimeFeatures(cri)
    await runtime.stop()
    runtime.answers = {"Version": Refuse("UNAVAILABLE", "starting"), "Status": NEW_STATUS}
    await runtime.start()
    with pytest.raises(CriError):
        await features.status()
    runtime.answers["Version"] = version("2.4.2")
    await features.status()
    assert features.version.runtime_version == "2.4.2"


async def test_status_same_connection_requests_version_once(runtime: Runtime, cri: RuntimeConnection) -> None:
    features = RuntimeFeatures(cri)
    runtime.seen.clear()
    for _ in range(3):
        await features.status()
    assert [seen.method for seen in runtime.seen] == ["Status"] * 3


async def test_missing_new_containerd_with_old_runc_lists_what_its_handler_lacks(
    runtime: Runtime, cri: RuntimeConnection
) -> None:
    runtime.answers["Version"] = version("2.4.2")
    features = RuntimeFeatures(cri)
    features.version = version("2.4.2")
    await features.status()
    assert features.missing() == ["user namespaces", "recursive read-only mounts", "supplementalGroupsPolicy"]
