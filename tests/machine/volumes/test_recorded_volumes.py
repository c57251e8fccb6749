"""The reference's own volumes, recorded: the same paths, owners, modes, links and contents.

`data/written-volumes.tsv` is what kubelet v1.36.3 made of the pod below, without security context
(`plain`), with `runAsUser: 1234` (`user`) and with `fsGroup: 2000` (`volumes`). Made comparable: the
names of versions, the token, and annotations that kubectl and the kubelet add by themselves.
"""

import csv
import json
import os
import re
import stat
from pathlib import Path
from typing import Any

import pytest
import yaml

from pykubelet.api.pod import Pod
from pykubelet.volumes.manager import PodVolumes
from tests.support.volumes import Shelf, mounted_at, needs_root, pod_with, volumes_at

GOLDEN = Path(__file__).parents[2] / "data/golden"
RECORDED = Path(__file__).parents[2] / "data/written-volumes.tsv"
VERSION = re.compile(r"\.\.\d{4}_[\d_]+\.\d+")
CONTEXTS: dict[str, dict[str, int]] = {"plain": {}, "user": {"runAsUser": 1234}, "volumes": {"fsGroup": 2000}}
Row = tuple[str, ...]

pytestmark = [pytest.mark.machine, needs_root]


def given_documents() -> list[dict[str, Any]]:
    return list(yaml.safe_load_all((GOLDEN / "given-volumes.yaml").read_text()))


@pytest.fixture
def shelf() -> Shelf:
    files, creds, _ = given_documents()
    return Shelf(
        config_maps={"files": {**files["data"], "raw.bin": b"\0\1\2"}},
        secrets={"creds": {key: value.encode() for key, value in creds["stringData"].items()}},
    )


@pytest.fixture
def volumes(root: Path, shelf: Shelf) -> PodVolumes:
    return volumes_at(root, shelf, lambda pod: 64 << 20)


def recorded_pod(name: str) -> Pod:
    """The pod of `given-volumes`, without its hostPath, and with two volumes mounted inside of others."""
    document = given_documents()[2]
    spec = document["spec"]
    spec["volumes"] = [volume for volume in spec["volumes"] if volume["name"] != "host"]
    mounts = [mount for mount in spec["containers"][0]["volumeMounts"] if mount["name"] != "host"]
    mounts += [
        {"name": "empty", "mountPath": "/v/all/nested/deep"},
        {"name": "empty", "mountPath": "/v/cm/inner"},
    ]
    spec["containers"][0]["volumeMounts"] = mounts
    spec["securityContext"] = CONTEXTS[name]
    metadata = {key: document["metadata"][key] for key in ("labels", "annotations")} | {"name": name}
    return pod_with(metadata=metadata, **spec)


def recorded(name: str) -> list[Row]:
    with RECORDED.open() as file:
        rows = csv.reader(file, delimiter="\t", quoting=csv.QUOTE_NONE)
        return [tuple(row[1:]) for row in rows if row[0] == name]


def found(pod: Path) -> list[Row]:
    paths = [path for top in ("plugins", "volumes") for path in ((pod / top), *(pod / top).rglob("*"))]
    return sorted(row(path, pod) for path in paths)


def row(path: Path, pod: Path) -> Row:
    entry = path.lstat()
    kind, mode, content = "file", f"{stat.S_IMODE(entry.st_mode):04o}", ""
    if stat.S_ISLNK(entry.st_mode):
        kind, mode, content = "link", "-", VERSION.sub("..VERSION", os.fspath(path.readlink()))
    elif stat.S_ISDIR(entry.st_mode):
        kind = "dir"
    else:
        content = "TOKEN" if path.name == "token" else path.read_text()
    name = VERSION.sub("..VERSION", str(path.relative_to(pod)))
    return name, kind, mode, str(entry.st_uid), str(entry.st_gid), json.dumps(content)


@pytest.mark.parametrize("name", CONTEXTS)
async def test_mount_recorded_pod_files_equal_upstream(root: Path, volumes: PodVolumes, name: str) -> None:
    pod = recorded_pod(name)
    mounted = await volumes.mount(pod)
    assert found(root / "pods/u-1") == recorded(name)
    await volumes.refresh(pod)
    assert found(root / "pods/u-1") == recorded(name)
    in_memory = {volume for volume, at in mounted.items() if mounted_at(Path(at.path))}
    assert in_memory == {"mem", "sec", "info", "all"}
    await volumes.unmount("u-1")
    assert sorted(path.name for path in (root / "pods/u-1").rglob("*")) == ["plugins", "volumes"]


async def test_sub_paths_recorded_pod_mounts_equal_upstream(
    root: Path, volumes: PodVolumes, tmp_path: Path
) -> None:
    """What of the host the recorded container was given."""
    document = given_documents()[2]
    (host,) = (volume for volume in document["spec"]["volumes"] if volume["name"] == "host")
    host["hostPath"]["path"] = str(tmp_path / "hostdir")
    metadata = {key: document["metadata"][key] for key in ("name", "labels", "annotations")}
    pod = pod_with(metadata=metadata, **document["spec"])
    main = pod.spec.containers[0]
    mounted = await volumes.mount(pod)
    bound = await volumes.sub_paths(pod, main, mounted, {4: "a.conf", 5: "volumes/deep"})
    given = []
    for index, mount in enumerate(main.volume_mounts):
        volume = mounted[mount.name]
        path = bound.get(index, volume.path).replace(str(tmp_path / "hostdir"), "/srv/hostdir")
        path = path.replace(str(root), "ROOT").replace("u-1", "POD_UID")
        given.append((mount.mount_path, path, mount.read_only or volume.read_only))
    recording = json.loads((GOLDEN / "given-volumes.json").read_text())["volumes"]["cri"][1]["config"]
    assert given == [
        (mount["container_path"], mount["host_path"], mount.get("readonly", False))
        for mount in recording["mounts"]
        if mount["container_path"].startswith("/v/")
    ]
    assert Path(bound[4]).read_text() == "alpha\n"
