import gc
import os
from pathlib import Path

import pytest

from pykubelet.volumes.errors import VolumePluginError
from pykubelet.volumes.file_projection import make_mount_points, nested_mount_points
from tests.support.volumes import mode_of, pod_with

PATHS: list[tuple[dict[str, str], list[str]]] = [
    ({"/v": "me"}, []),
    ({"/v": "me", "/w": "other"}, []),
    ({"/v": "me", "/v/in": "other"}, ["in"]),
    ({"/v": "me", "/v/": "other"}, []),
    ({"/v": "me", "/vain": "other", "/v-2/x": "other"}, []),
    ({"/v": "other", "/v/in": "me"}, []),
    ({"/v": "me", "/v/in": "other", "/v/in/in": "third"}, ["in"]),
    ({"/v": "me", "/v/in": "me", "/v/in/in": "third"}, ["in"]),
    ({"/v": "me", "/v/b": "other", "/v/b-2": "other", "/v/b/c": "other"}, ["b", "b-2"]),
    ({"//v/./": "me", "/w/../v/deep/er": "other"}, ["deep/er"]),
    ({"/v": "me", "/v/..data": "other", "/v/..data/x": "third"}, []),
    ({"/v": "me", "/v/../../x": "other"}, []),
    ({"v": "me", "v/in": "other"}, ["in"]),
]


@pytest.mark.parametrize(("mounts", "points"), PATHS)
def test_nested_mount_points_returns_outermost_paths(mounts: dict[str, str], points: list[str]) -> None:
    listed = [{"name": name, "mountPath": path} for path, name in mounts.items()]
    container, other = {"name": "c", "volumeMounts": listed}, {"name": "other"}
    for pod in (pod_with(containers=[container]), pod_with(containers=[other], initContainers=[container])):
        assert nested_mount_points(pod, "me") == points


def test_nested_mount_points_merges_all_containers() -> None:
    def mounting(inner: str) -> list[dict[str, str]]:
        return [{"name": "me", "mountPath": "/v"}, {"name": "other", "mountPath": inner}]

    pod = pod_with(
        containers=[
            {"name": "one", "volumeMounts": mounting("/v/a")},
            {"name": "two", "volumeMounts": mounting("/v/a")},
            {"name": "three", "volumeMounts": mounting("/v/b")},
        ]
    )
    assert nested_mount_points(pod, "me") == ["a", "b"]


@pytest.mark.parametrize("path", ["..", "../x", "a/../../x"])
def test_nested_mount_points_path_outside_container_raises(path: str) -> None:
    mounts = [{"name": "me", "mountPath": path}, {"name": "other", "mountPath": f"{path}/in"}]
    pod = pod_with(containers=[{"name": "c", "volumeMounts": mounts}])
    with pytest.raises(VolumePluginError, match="invalid container mount point"):
        nested_mount_points(pod, "me")


def test_make_mount_points_creates_directories_inside_volume_only(tmp_path: Path) -> None:
    volume, outside = tmp_path / "volume", tmp_path / "outside"
    volume.mkdir()
    outside.mkdir()
    (volume / "link").symlink_to(outside)
    (volume / "file").touch()
    gc.collect()  # what earlier tests left open is closed now and not meanwhile
    before = sorted(Path("/proc/self/fd").iterdir())
    deep = "/".join("d" * 500)
    for _ in range(2):
        make_mount_points(volume, ["a/b", "link/x", "file/x", deep])
    assert (volume / "a/b").is_dir()
    assert mode_of(volume / "a/b") == oct(0o755 & ~_umask())
    assert (volume / deep).is_dir()
    assert list(outside.iterdir()) == []
    assert sorted(Path("/proc/self/fd").iterdir()) == before


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask
