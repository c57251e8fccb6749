import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from pykubelet.api.meta import from_document
from pykubelet.api.pod import Pod
from pykubelet.host.mounts import plan_unmounts, read_mounts, unmount
from pykubelet.pods.defaults import apply_defaults
from pykubelet.volumes.plain import PlainVolumes

ALLOCATABLE = 1 << 30

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="needs root to mount")


@pytest.fixture
def root(tmp_path: Path) -> Iterator[Path]:
    """An agent's root, in which nothing stays mounted."""
    yield tmp_path / "root"
    left = plan_unmounts(read_mounts(), tmp_path)
    for point in left:
        unmount(point, detach=True)


@pytest.fixture
def volumes(root: Path) -> PlainVolumes:
    return PlainVolumes(root, memory_limit=lambda pod: None, allocatable_memory=ALLOCATABLE)


def pod_with(*volumes: dict[str, Any], **spec: Any) -> Pod:
    """A pod with these volumes, and containers that do not matter."""
    spec = {"containers": [{"name": "main", "image": "i"}], "volumes": list(volumes)} | spec
    document = {"metadata": {"name": "p", "namespace": "default", "uid": "u-1"}, "spec": spec}
    pod = from_document(Pod, document)
    apply_defaults(pod)
    return pod
