"""When containerd counts as ready to run pods, and which containers it cannot take over."""

import dataclasses
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from pykubelet.cri import runtime_pb2 as pb
from pykubelet.standalone.daemon import Daemon
from pykubelet.standalone.instance import NAMESPACE, Instance
from pykubelet.standalone.requirements import UNKNOWN_VERSION, HostRequirements, Version
from pykubelet.standalone.runtime import unmanageable_ids
from tests.support.cri_servers import Runtime

HOST = HostRequirements({}, Path("/cni"), apparmor=False, may_lower_oom_score=False)


@pytest.fixture
def instance() -> Iterator[Instance]:
    with tempfile.TemporaryDirectory(prefix="pyd-", dir="/tmp") as directory:
        made = Instance.at(Path(directory) / "d")
        made.socket.parent.mkdir(parents=True)
        yield made


@pytest.mark.parametrize(
    ("failing", "unmet"),
    [
        ("RuntimeReady", "RuntimeReady: Because of a test"),
        ("NetworkReady", "NetworkReady: Because of a test"),
        # containerd 2.x reports deprecated settings and cgroup v1 as conditions, and runs pods nevertheless.
        ("ContainerdHasNoDeprecationWarnings", ""),
    ],
)
async def test_unmet_conditions_only_required_ones(instance: Instance, failing: str, unmet: str) -> None:
    names = ("RuntimeReady", "NetworkReady", "ContainerdHasNoDeprecationWarnings")
    conditions = [
        pb.RuntimeCondition(type=name, status=name != failing, reason="Because", message="of a test")
        for name in names
    ]
    async with Runtime(instance.socket) as runtime:
        runtime.answers["Status"] = pb.StatusResponse(status=pb.RuntimeStatus(conditions=conditions))
        assert await Daemon(instance, dataclasses.replace(HOST))._unmet_conditions() == unmet


@pytest.mark.parametrize(
    ("version", "expected"),
    [((1, 6, 20), {"new"}), ((1, 7, 27), {"new"}), ((2, 0, 0), set()), (UNKNOWN_VERSION, set())],
)
def test_unmanageable_ids_only_shims_with_newer_task_api(
    instance: Instance, version: Version, expected: set[str]
) -> None:
    bundles = instance.containerd_state / "io.containerd.runtime.v2.task" / NAMESPACE
    contents = {
        "new": '{"version": 3}',
        "old": '{"version": 2}',
        "bad": "{",
        "list": "[]",
        "text": '{"version": "3"}',
    }
    for name, content in contents.items():
        (bundles / name).mkdir(parents=True)
        (bundles / name / "bootstrap.json").write_text(content)
    (bundles / "older").mkdir()
    assert unmanageable_ids(instance, version) == expected
