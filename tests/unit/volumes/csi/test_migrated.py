"""Volumes of kinds of old are read as the reference reads them, and given by the drivers that have them now.

`tests/data/golden/csi-migration.json` is what the reference's library makes of the same volumes.
"""

import json
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, cast

import pytest

from pykubelet.api.meta import from_document, to_document
from pykubelet.api.storage import PersistentVolume
from pykubelet.api.volume import Volume
from pykubelet.apiserver.client import ApiClient
from pykubelet.volumes.csi.csinode import MIGRATED_PLUGINS
from pykubelet.volumes.csi.names import MIGRATED
from pykubelet.volumes.csi.translation import MigrationError, migrated_inline_volume, migrated_volume
from pykubelet.volumes.errors import VolumeError
from pykubelet.volumes.pvc import AffinityError, PvcResolver
from tests.support.csi import Rig, make_pod, needs_root
from tests.support.csi_driver.backend import is_mounted
from tests.support.csi_driver.process import DriverProcess
from tests.support.volumes import Server, Shelf, pod_with, volumes_at

GOLDEN = Path(__file__).parents[3] / "data/golden/csi-migration.json"
CASES = json.loads(GOLDEN.read_text())
CLAIM = {"name": "data", "persistentVolumeClaim": {"claimName": "claim"}}


def named(case: Mapping[str, Any]) -> str:
    given = case["given"].get("spec", case["given"])
    (kind,) = set(given) & set(MIGRATED)
    return f"{'persistent' if 'spec' in case['given'] else 'inline'}-{kind}"


@pytest.mark.parametrize("case", CASES, ids=named)
def test_migrated_volume_translation_equals_upstream_recording(case: Mapping[str, Any]) -> None:
    expected = case["translated"]

    def translate() -> PersistentVolume | None:
        if "spec" in case["given"]:
            return migrated_volume(from_document(PersistentVolume, case["given"]))
        wanted = migrated_inline_volume(make_pod(), from_document(Volume, case["given"]))
        assert wanted.name == expected["name"].replace("/", "~")
        assert wanted.persistent is not None
        assert (wanted.kind, wanted.source) == ("csi", wanted.persistent.spec.csi)
        return wanted.persistent

    if isinstance(expected, str):
        # What follows a colon in it is a map as Go prints it.
        with pytest.raises(
            MigrationError, match=re.escape(f"translate in-tree pv to CSI: {expected.split(': ')[0]}")
        ):
            translate()
        return
    found = translate()
    assert found is not None
    assert [kind for kind, _ in found.spec.sources] == ["csi"]
    assert found.metadata.name == expected["name"]
    assert found.spec.access_modes == expected["accessModes"]
    controllers = ("controllerExpandSecretRef",)
    assert to_document(found.spec.csi) == {k: v for k, v in expected["csi"].items() if k not in controllers}
    affinity = found.spec.node_affinity
    assert (to_document(affinity) if affinity is not None else None) == expected.get("nodeAffinity")


def test_migrated_plugins_each_has_translation_and_recording() -> None:
    assert len(MIGRATED) == len(MIGRATED_PLUGINS.split(",")), "what controllers attach, the node must mount"
    covered = {named(case) for case in CASES}
    assert covered == {f"{way}-{kind}" for way in ("persistent", "inline") for kind in MIGRATED}


def test_migrated_volume_other_type_unchanged() -> None:
    found = from_document(PersistentVolume, {"metadata": {"name": "pv"}, "spec": {"nfs": {"server": "s"}}})
    assert migrated_volume(found) is found


async def test_pvc_resolver_migrated_volume_resolves_to_csi() -> None:
    server, pod = Server(), pod_with(CLAIM)
    server.claim("claim", "pv-1")
    zone = {"key": "failure-domain.beta.kubernetes.io/zone", "operator": "In", "values": ["a"]}
    server.volume(
        "pv-1",
        "claim",
        awsElasticBlockStore={"volumeID": "vol-1"},
        nodeAffinity={"required": {"nodeSelectorTerms": [{"matchExpressions": [zone]}]}},
    )
    labels = {"topology.ebs.csi.aws.com/zone": "a"}
    api = cast(ApiClient, server)
    claims = PvcResolver(api, "node", lambda: labels)
    wanted = await claims.resolve(pod, pod.spec.volumes[0])
    assert (wanted.kind, wanted.name) == ("csi", "pv-1")
    assert (wanted.source.driver, wanted.source.volume_handle) == ("ebs.csi.aws.com", "vol-1")
    labels["topology.ebs.csi.aws.com/zone"] = "b"
    with pytest.raises(AffinityError):
        await claims.resolve(pod, pod.spec.volumes[0])
    own = PvcResolver(api, "node", lambda: None, plugin_types=("awsElasticBlockStore",))
    assert (await own.resolve(pod, pod.spec.volumes[0])).kind == "awsElasticBlockStore", "somebody gives it"


async def test_migrated_inline_volume_standalone_driver_not_found(root: Path, shelf: Shelf) -> None:
    """Nobody can attach it; the reason is the driver's, and no longer the kind."""
    pod = pod_with({"name": "data", "cinder": {"volumeID": "c-1"}})
    with pytest.raises(VolumeError, match=r"driver name cinder\.csi\.openstack\.org not found in the list"):
        await volumes_at(root, shelf).mount(pod)


@pytest.mark.machine
@needs_root
async def test_migrated_inline_volume_is_published_by_csi_driver(
    rig: Rig, make_driver: Callable[..., DriverProcess]
) -> None:
    name = MIGRATED["azureDisk"]
    driver = make_driver(f"--name={name}")
    source = {"diskName": "d", "diskURI": "/subscriptions/s/disks/d", "fsType": "ext4", "kind": "Managed"}
    wanted = migrated_inline_volume(make_pod(), from_document(Volume, {"name": "data", "azureDisk": source}))
    # The test's driver names its files by the handle.
    handle = wanted.source.volume_handle = "d"
    rig.attach(handle, driver=name)
    async with rig.running() as kind:
        await rig.registered(driver=name)
        mounted = await kind.set_up(wanted)
        folder = rig.root / "pods/u-1/volumes/kubernetes.io~csi/~subscriptions~s~disks~d"
        assert mounted.path == str(folder / "mount")
        assert mounted.attached == f"kubernetes.io/csi/{name}^{handle}"
        assert is_mounted(folder / "mount")
        (published,) = driver.calls("NodePublishVolume")
        assert published["volume_context"] == {"fstype": "ext4", "kind": "Managed"}
        await kind.tear_down("u-1", wanted.name)
        await kind.unmount_unused(())
    assert (rig.left(), driver.loops_left()) == ([], [])
