"""Claims of a standalone node: the directory behind one, and what is wrong with others."""

import os
import stat
from pathlib import Path

import pytest

from pykubelet.api.meta import from_document
from pykubelet.api.pod import Pod
from pykubelet.api.storage import PersistentVolumeClaim
from pykubelet.api.volume import LocalDisk
from pykubelet.podconfig.local_objects import LocalObjects
from pykubelet.volumes.local_claims import LocalClaimResolver, local_volume_path
from pykubelet.volumes.plugin import VolumeToMount
from pykubelet.volumes.pvc import ClaimError, is_exclusive


def claim(name: str = "data", namespace: str = "default", **spec: object) -> PersistentVolumeClaim:
    return from_document(
        PersistentVolumeClaim, {"metadata": {"name": name, "namespace": namespace}, "spec": spec}
    )


def pod(claim_name: str = "data", *, devices: bool = False) -> Pod:
    mounts = {"volumeDevices": [{"name": "v", "devicePath": "/dev/x"}]} if devices else {
        "volumeMounts": [{"name": "v", "mountPath": "/v"}]
    }  # fmt: skip
    return from_document(
        Pod,
        {
            "metadata": {"name": "p", "namespace": "default", "uid": "u"},
            "spec": {
                "containers": [{"name": "c", **mounts}],
                "volumes": [{"name": "v", "persistentVolumeClaim": {"claimName": claim_name}}],
            },
        },
    )


async def resolve(root: Path, objects: LocalObjects, found: Pod) -> VolumeToMount:
    return await LocalClaimResolver(root, objects.claim).resolve(found, found.spec.volumes[0])


@pytest.fixture
def objects() -> LocalObjects:
    made = LocalObjects()
    made.offer([("/m/a.yaml", claim()), ("/m/b.yaml", claim("data", "other"))])
    return made


async def test_resolve_creates_directory_that_any_user_of_a_container_can_write(
    tmp_path: Path, objects: LocalObjects
) -> None:
    umask = os.umask(0o077)
    try:
        volume = await resolve(tmp_path, objects, pod())
    finally:
        os.umask(umask)
    path = tmp_path / "local-volumes/default/data"
    assert (volume.kind, volume.source) == ("local", LocalDisk(path=str(path)))
    assert stat.S_IMODE(path.stat().st_mode) == 0o777
    assert stat.S_IMODE((tmp_path / "local-volumes").stat().st_mode) == 0o700
    (path / "file").touch()
    path.chmod(0o750)
    again = await resolve(tmp_path, objects, pod())
    assert again.name == volume.name
    assert (path / "file").exists()
    assert stat.S_IMODE(path.stat().st_mode) == 0o750, "what the user has set stays"


async def test_resolve_names_are_unique_among_namespaces(tmp_path: Path) -> None:
    objects = LocalObjects()
    objects.offer([("a", claim("b.c", "a")), ("b", claim("c", "a-b"))])
    names = set()
    for namespace, name in (("a", "b.c"), ("a-b", "c")):
        found = pod(name)
        found.metadata.namespace = namespace
        names.add((await resolve(tmp_path, objects, found)).name)
    assert names == {"a.b.c", "a-b.c"}


@pytest.mark.parametrize("name", ["missing", "../../etc", "a/b", ".."])
async def test_resolve_unknown_claim_raises_with_remedy_and_creates_nothing(
    tmp_path: Path, objects: LocalObjects, name: str
) -> None:
    with pytest.raises(ClaimError, match="not found: write a PersistentVolumeClaim"):
        await resolve(tmp_path, objects, pod(name))
    assert not (tmp_path / "local-volumes").exists()


async def test_resolve_before_the_first_scan_is_not_reported_as_missing(tmp_path: Path) -> None:
    with pytest.raises(ClaimError, match="is not known yet"):
        await resolve(tmp_path, LocalObjects(), pod())


async def test_resolve_block_device_and_unwritable_root_raise(tmp_path: Path, objects: LocalObjects) -> None:
    with pytest.raises(ClaimError, match="volumeDevices"):
        await resolve(tmp_path, objects, pod(devices=True))
    blocked = tmp_path / "file"
    blocked.touch()
    with pytest.raises(ClaimError, match="error processing PVC default/data"):
        await resolve(blocked, objects, pod())


async def test_resolve_read_write_once_pod_is_exclusive(tmp_path: Path) -> None:
    objects = LocalObjects()
    objects.offer([("a", claim(accessModes=["ReadWriteOncePod"]))])
    volume = await resolve(tmp_path, objects, pod())
    assert volume.persistent is not None
    assert is_exclusive(volume.persistent)


@pytest.mark.parametrize(("namespace", "name"), [("..", "x"), ("a", ".."), ("a", "x/y"), ("", "x")])
def test_local_volume_path_outside_raises(namespace: str, name: str) -> None:
    with pytest.raises(ValueError, match="cannot be a folder's name"):
        local_volume_path(Path("/r"), namespace, name)


def test_offer_claim_in_two_files_is_a_problem() -> None:
    objects = LocalObjects()
    (problem,) = objects.offer([("/m/a.yaml", claim()), ("/m/b.yaml", claim())])
    assert str(problem) == (
        "/m/b.yaml: persistentVolumeClaim default/data is already in /m/a.yaml: rename one, or remove it"
    )
