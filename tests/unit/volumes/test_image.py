from pathlib import Path

import pytest

from pykubelet.volumes.errors import VolumeError
from pykubelet.volumes.manager import PodVolumes
from pykubelet.volumes.plugin import MemoryLimits, MountedVolume, VolumeOptions
from tests.support.volumes import ALLOCATABLE, Node, Shelf, pod_with

TOOLS = {"name": "tools", "image": {"reference": "registry/tools:1"}}


@pytest.fixture(params=[True, False])
def possible(request: pytest.FixtureRequest) -> bool:
    return bool(request.param)


async def test_mount_image_volume_follows_runtime_support(root: Path, shelf: Shelf, possible: bool) -> None:
    volumes = PodVolumes(
        root,
        objects=shelf,
        node=Node(),
        memory=MemoryLimits(lambda pod: None, ALLOCATABLE),
        options=VolumeOptions(image_volumes=lambda: possible),
    )
    if possible:
        mounted = await volumes.mount(pod_with(TOOLS))
        assert mounted == {"tools": MountedVolume("", read_only=True, image="registry/tools:1")}
        await volumes.unmount("u-1")
        with pytest.raises(VolumeError, match="it names no image"):
            await volumes.mount(pod_with({"name": "tools", "image": {}}))
    else:
        with pytest.raises(VolumeError, match=r"cannot mount images: containerd can from version 2\.1 on"):
            await volumes.mount(pod_with(TOOLS))
