"""Claims: which are refused and in which words, and what a pod gets for one."""

from pathlib import Path
from typing import Any

import pytest

from pykubelet.api.meta import from_document
from pykubelet.api.pod import Pod
from pykubelet.api.selector import NodeSelector
from pykubelet.api.storage import PersistentVolume
from pykubelet.volumes.errors import VolumeError, VolumeLimitExceeded, failure_event, set_up_failure_text
from pykubelet.volumes.manager import PodVolumes
from pykubelet.volumes.pvc import AffinityError, check_affinity, is_exclusive, mount_options, volume_group
from tests.support.volumes import Server, Shelf, pod_with, volumes_at

CLAIM = {"name": "data", "persistentVolumeClaim": {"claimName": "claim"}}
EPHEMERAL = {"name": "data", "ephemeral": {"volumeClaimTemplate": {"spec": {}}}}
DEVICE = [{"name": "main", "image": "i", "volumeDevices": [{"name": "data", "devicePath": "/dev/x"}]}]


@pytest.fixture
def server() -> Server:
    return Server()


@pytest.fixture
def labels() -> dict[str, str]:
    return {"kubernetes.io/hostname": "node-1"}


@pytest.fixture
def volumes(root: Path, shelf: Shelf, server: Server, labels: dict[str, str]) -> PodVolumes:
    return volumes_at(root, shelf, server=server, node_labels=lambda: labels)


def bound(server: Server, path: Path, **spec: Any) -> None:
    """Have a claim with a folder of this machine behind it."""
    server.claim("claim", "pv-1")
    server.volume("pv-1", "claim", **({"hostPath": {"path": str(path)}} | spec))


async def refusal(volumes: PodVolumes, pod: Pod) -> str:
    with pytest.raises(VolumeError) as caught:
        await volumes.mount(pod)
    return str(caught.value)


async def test_mount_claim_with_host_path_returns_path(
    volumes: PodVolumes, server: Server, tmp_path: Path
) -> None:
    bound(server, tmp_path)
    mounted = (await volumes.mount(pod_with(CLAIM)))["data"]
    assert (mounted.path, mounted.read_only) == (str(tmp_path), False)
    read_only = {"name": "data", "persistentVolumeClaim": {"claimName": "claim", "readOnly": True}}
    assert (await volumes.mount(pod_with(read_only)))["data"].read_only


def test_failure_event_follows_action_and_volume_mode() -> None:
    affinity = set_up_failure_text("v", "no", AffinityError.action, block=True)
    assert affinity == 'MapVolume.NodeAffinity check failed for volume "v" : no'
    assert failure_event(affinity) == "FailedMount"
    attach = set_up_failure_text("v", "no", VolumeLimitExceeded.action, block=True)
    assert attach == 'MapVolume.WaitForAttach failed for volume "v" : no'
    assert failure_event(attach) == "FailedMapVolume"
    assert failure_event(set_up_failure_text("v", "no")) == "FailedMount"


UNABLE = "Unable to attach or mount volumes: unmounted volumes=[data], unattached volumes=[], "
FAILED = f"{UNABLE}failed to process volumes=[data]: error processing PVC default/claim: "


class TestRefused:
    @pytest.mark.parametrize(
        ("claim", "reason"),
        [
            ({"status": {"phase": "Pending"}}, "PVC is not bound"),
            ({"status": {"phase": "Lost"}}, "PVC is not bound"),
            ({"spec": {"volumeName": ""}}, "PVC has empty pvc.Spec.VolumeName"),
            ({"metadata": {"deletionTimestamp": "2026-01-01T00:00:00Z"}}, "PVC is being deleted"),
            (
                {"spec": {"volumeName": "other"}},
                'failed to fetch PV other from API server: persistentvolumes "other" not found',
            ),
            (
                {"metadata": {"uid": "new"}},
                "found PV object pv-1 but its pv.Spec.ClaimRef.UID uid-of-claim "
                "does not point to claim.UID new",
            ),
        ],
    )
    async def test_mount_claim_unusable_raises_upstream_message(
        self, volumes: PodVolumes, server: Server, tmp_path: Path, claim: dict[str, Any], reason: str
    ) -> None:
        bound(server, tmp_path)
        server.claim("claim", "pv-1", **claim)
        assert await refusal(volumes, pod_with(CLAIM)) == FAILED + reason

    async def test_mount_claim_missing_raises(self, volumes: PodVolumes) -> None:
        reason = 'failed to fetch PVC from API server: persistentvolumeclaims "claim" not found'
        assert await refusal(volumes, pod_with(CLAIM)) == FAILED + reason

    async def test_mount_claim_deleted_with_pvc_protection_succeeds(
        self, volumes: PodVolumes, server: Server, tmp_path: Path
    ) -> None:
        bound(server, tmp_path)
        metadata = {
            "deletionTimestamp": "2026-01-01T00:00:00Z",
            "finalizers": ["kubernetes.io/pvc-protection"],
            "uid": "uid-of-claim",
            "name": "claim",
        }
        server.claim("claim", "pv-1", metadata=metadata)
        assert (await volumes.mount(pod_with(CLAIM))).keys() == {"data"}

    async def test_mount_persistent_volume_unbound_raises(self, volumes: PodVolumes, server: Server) -> None:
        server.claim("claim", "pv-1")
        server.volume("pv-1", hostPath={"path": "/"})
        reason = (
            "found PV object pv-1 but it has a nil pv.Spec.ClaimRef "
            "indicating it is not yet bound to the claim"
        )
        assert await refusal(volumes, pod_with(CLAIM)) == FAILED + reason

    async def test_mount_volume_mode_mismatch_raises(
        self, volumes: PodVolumes, server: Server, tmp_path: Path
    ) -> None:
        bound(server, tmp_path, volumeMode="Block")
        assert "volume data has volumeMode Block, but is specified in volumeMounts" in await refusal(
            volumes, pod_with(CLAIM)
        )
        assert "volumes of kind hostPath cannot be had as block devices" in await refusal(
            volumes, pod_with(CLAIM, containers=DEVICE)
        )
        bound(server, tmp_path, volumeMode="Filesystem")
        assert "volume data has volumeMode Filesystem, but is specified in volumeDevices" in await refusal(
            volumes, pod_with(CLAIM, containers=DEVICE)
        )

    async def test_mount_unsupported_mount_options_raises(
        self, volumes: PodVolumes, server: Server, tmp_path: Path
    ) -> None:
        bound(server, tmp_path, mountOptions=["hard"])
        assert await refusal(volumes, pod_with(CLAIM)) == (
            'MountVolume.MountOptionSupport check failed for volume "pv-1" : '
            "mount options are not supported for this volume type"
        )

    async def test_mount_node_affinity_mismatch_raises(
        self, volumes: PodVolumes, server: Server, labels: dict[str, str], tmp_path: Path
    ) -> None:
        terms = [
            {"matchExpressions": [{"key": "kubernetes.io/hostname", "operator": "In", "values": ["node-1"]}]}
        ]
        bound(server, tmp_path, nodeAffinity={"required": {"nodeSelectorTerms": terms}})
        await volumes.mount(pod_with(CLAIM))
        labels["kubernetes.io/hostname"] = "node-2"
        assert await refusal(volumes, pod_with(CLAIM, metadata={"uid": "u-2"})) == (
            'MountVolume.NodeAffinity check failed for volume "data" : no matching NodeSelectorTerms'
        )

    async def test_mount_removed_volume_type_raises(self, volumes: PodVolumes, server: Server) -> None:
        server.claim("claim", "pv-1")
        server.volume("pv-1", "claim", cephfs={"monitors": ["m"]})
        assert 'for volume "pv-1" : cephfs volumes are no longer mounted' in await refusal(
            volumes, pod_with(CLAIM)
        )

    async def test_mount_untranslatable_in_tree_volume_raises(
        self, volumes: PodVolumes, server: Server
    ) -> None:
        server.claim("claim", "pv-1")
        server.volume("pv-1", "claim", azureDisk={"diskURI": "/d", "kind": "Shared"})
        assert await refusal(volumes, pod_with(CLAIM)) == (
            f"{FAILED}failed to translate in-tree pv to CSI: kind(Shared) is not supported in csi migration"
        )

    async def test_mount_claim_standalone_raises(self, root: Path, shelf: Shelf) -> None:
        said = await refusal(volumes_at(root, shelf), pod_with(CLAIM))
        assert said.startswith(UNABLE)
        assert 'needs the claim "claim", and this node belongs to no cluster' in said

    async def test_mount_several_failures_are_aggregated(
        self, volumes: PodVolumes, server: Server, tmp_path: Path
    ) -> None:
        other = {"name": "other", "persistentVolumeClaim": {"claimName": "nothing"}}
        bad = {"name": "bad", "hostPath": {"path": "/nowhere", "type": "File"}}
        bound(server, tmp_path)
        server.claim("claim")
        with pytest.raises(VolumeError) as caught:
            await volumes.mount(pod_with(CLAIM, other, bad))
        first, second = caught.value.problems
        assert first.startswith('MountVolume.SetUp failed for volume "bad"')
        assert second == (
            "Unable to attach or mount volumes: unmounted volumes=[bad data other], unattached volumes=[], "
            "failed to process volumes=[data other]: error processing PVC default/claim: PVC is not bound; "
            "error processing PVC default/nothing: failed to fetch PVC from API server: "
            'persistentvolumeclaims "nothing" not found'
        )


class TestEphemeral:
    async def test_ephemeral_claim_not_owned_by_pod_raises(
        self, volumes: PodVolumes, server: Server, tmp_path: Path
    ) -> None:
        owner = {"apiVersion": "v1", "kind": "Pod", "name": "p", "uid": "u-1", "controller": True}
        metadata = {"name": "p-data", "namespace": "default", "uid": "uid-of-p-data"}
        server.volume("pv-1", "p-data", hostPath={"path": str(tmp_path)})
        server.claim("p-data", "pv-1", metadata=metadata | {"ownerReferences": [owner]})
        assert (await volumes.mount(pod_with(EPHEMERAL)))["data"].path == str(tmp_path)
        await volumes.unmount("u-1")
        for refs in ([], [owner | {"uid": "u-0"}], [owner | {"controller": False}]):
            server.claim("p-data", "pv-1", metadata=metadata | {"ownerReferences": refs})
            assert "PVC default/p-data was not created for pod default/p (pod is not owner)" in await refusal(
                volumes, pod_with(EPHEMERAL)
            )


class TestOnePodOnly:
    async def test_read_write_once_pod_second_pod_waits_until_first_unmounts(
        self, volumes: PodVolumes, server: Server, tmp_path: Path
    ) -> None:
        woken: list[str] = []
        volumes.add_listener(woken.append)
        bound(server, tmp_path, accessModes=["ReadWriteOncePod"])
        first, second = pod_with(CLAIM), pod_with(CLAIM, metadata={"uid": "u-2", "name": "q"})
        await volumes.mount(first)
        await volumes.mount(first)
        assert await refusal(volumes, second) == (
            'MountVolume.SetUp failed for volume "pv-1" : '
            "volume uses the ReadWriteOncePod access mode and is already in use by another pod"
        )
        assert woken == []
        await volumes.unmount("u-1")
        assert woken == ["u-2"]
        await volumes.mount(second)

    async def test_read_write_once_pod_with_other_mode_is_shared(
        self, volumes: PodVolumes, server: Server, tmp_path: Path
    ) -> None:
        bound(server, tmp_path, accessModes=["ReadWriteOncePod", "ReadWriteOnce"])
        for uid in ("u-1", "u-2"):
            await volumes.mount(pod_with(CLAIM, metadata={"uid": uid}))

    async def test_read_write_once_pod_kubelet_restarted_counts_existing_mount(
        self, root: Path, shelf: Shelf, volumes: PodVolumes, server: Server, tmp_path: Path
    ) -> None:
        bound(server, tmp_path, accessModes=["ReadWriteOncePod"])
        (tmp_path / "disk").mkdir()
        server.volume("pv-1", "claim", local={"path": f"{tmp_path}/disk"}, accessModes=["ReadWriteOncePod"])
        later = volumes_at(root, shelf, server=server)
        (root / "pods/u-0/volumes/kubernetes.io~empty-dir/pv-1").mkdir(parents=True)
        (root / "pods/u-1/volumes/kubernetes.io~local-volume/pv-1").mkdir(parents=True)
        assert "already in use" in await refusal(later, pod_with(CLAIM, metadata={"uid": "u-2"}))
        await later.unmount("u-1")
        assert not (root / "pods/u-1/volumes/kubernetes.io~local-volume").exists()


class TestRefresh:
    async def test_refresh_after_restart_fetches_claims_once(
        self, volumes: PodVolumes, server: Server, tmp_path: Path
    ) -> None:
        bound(server, tmp_path)
        await volumes.refresh(pod_with(CLAIM))
        assert server.asked == 2
        await volumes.refresh(pod_with(CLAIM))
        assert server.asked == 2

    async def test_refresh_api_server_down_mounted_pod_keeps_volume(
        self, volumes: PodVolumes, server: Server, tmp_path: Path
    ) -> None:
        bound(server, tmp_path)
        server.away = True
        await volumes.refresh(pod_with(CLAIM))
        assert "it is away" in await refusal(volumes, pod_with(CLAIM))
        server.away = False
        await volumes.mount(pod_with(CLAIM))
        server.away = True
        mounted = await volumes.mount(pod_with(CLAIM))
        assert mounted["data"].path == str(tmp_path), "what was said of the claim still holds"

    async def test_mount_claim_lost_or_labels_changed_returns_existing_mount(
        self, volumes: PodVolumes, server: Server, labels: dict[str, str], tmp_path: Path
    ) -> None:
        """Its containers may be started again, whatever has become of the claim and of the node's labels."""
        here = {"key": "kubernetes.io/hostname", "operator": "In", "values": ["node-1"]}
        affinity = {"required": {"nodeSelectorTerms": [{"matchExpressions": [here]}]}}
        bound(server, tmp_path, nodeAffinity=affinity)
        await volumes.mount(pod_with(CLAIM))
        server.claim("claim", "pv-1", status={"phase": "Lost"})
        assert (await volumes.mount(pod_with(CLAIM)))["data"].path == str(tmp_path)
        bound(server, tmp_path, nodeAffinity=affinity)
        labels["kubernetes.io/hostname"] = "node-2"
        assert (await volumes.mount(pod_with(CLAIM)))["data"].path == str(tmp_path)
        server.objects.clear()
        assert (await volumes.mount(pod_with(CLAIM)))["data"].path == str(tmp_path)
        assert "not found" in await refusal(volumes, pod_with(CLAIM, metadata={"uid": "u-2"}))
        await volumes.unmount("u-1")
        assert "not found" in await refusal(volumes, pod_with(CLAIM))


async def test_mount_unused_volume_is_not_mounted(volumes: PodVolumes) -> None:
    pod = pod_with(CLAIM)
    pod.spec.containers[0].volume_mounts.clear()
    assert await volumes.mount(pod) == {}


def persistent(metadata: dict[str, Any] | None = None, **spec: Any) -> PersistentVolume:
    return from_document(PersistentVolume, {"metadata": metadata or {}, "spec": spec})


def test_mount_options_are_deduplicated_and_sorted() -> None:
    assert mount_options(persistent()) == ()
    assert mount_options(persistent(mountOptions=["ro", "hard", "", "hard"])) == ("hard", "ro")
    old = {"annotations": {"volume.beta.kubernetes.io/mount-options": "soft,bg"}}
    assert mount_options(persistent(old, mountOptions=["hard"])) == ("bg", "soft")


@pytest.mark.parametrize(
    ("text", "group"), [("1234", 1234), ("", None), ("-1", None), ("x", None), ("٣", None)]
)
def test_volume_group_parses_gid_annotation(text: str, group: int | None) -> None:
    assert volume_group(persistent({"annotations": {"pv.beta.kubernetes.io/gid": text}})) == group
    assert volume_group(None) is None


def test_is_exclusive_only_read_write_once_pod_returns_true() -> None:
    assert is_exclusive(persistent(accessModes=["ReadWriteOncePod"]))
    assert not is_exclusive(persistent(accessModes=["ReadWriteOncePod", "ReadWriteMany"]))
    assert not is_exclusive(persistent())


@pytest.mark.parametrize(
    ("terms", "fits"),
    [
        ([], False),
        ([{}], False),
        ([{"matchExpressions": [{"key": "zone", "operator": "In", "values": ["a", "b"]}]}], True),
        ([{"matchExpressions": [{"key": "zone", "operator": "NotIn", "values": ["a"]}]}], False),
        ([{"matchExpressions": [{"key": "zone", "operator": "Exists"}]}, {}], True),
        ([{"matchExpressions": [{"key": "zone", "operator": "DoesNotExist"}]}], False),
        ([{"matchExpressions": [{"key": "cores", "operator": "Gt", "values": ["7"]}]}], True),
        ([{"matchExpressions": [{"key": "cores", "operator": "Lt", "values": ["8"]}]}], False),
        ([{"matchExpressions": [{"key": "zone", "operator": "Gt", "values": ["8"]}]}], False),
        ([{"matchExpressions": [{"key": "none", "operator": "Gt", "values": ["8"]}]}], False),
        ([{"matchFields": [{"key": "metadata.name", "operator": "In", "values": ["n1"]}]}], True),
        ([{"matchFields": [{"key": "metadata.name", "operator": "In", "values": ["n2"]}]}], False),
    ],
)
def test_node_selector_fits_matches_terms(terms: list[dict[str, Any]], fits: bool) -> None:
    selector = from_document(NodeSelector, {"nodeSelectorTerms": terms})
    assert selector.fits({"zone": "a", "cores": "8"}, "n1") is fits


def test_check_affinity_invalid_operator_raises() -> None:
    terms = [{"matchExpressions": [{"key": "zone", "operator": "Near"}]}]
    found = persistent(nodeAffinity={"required": {"nodeSelectorTerms": terms}})
    with pytest.raises(Exception, match='"Near" is not a valid'):
        check_affinity(found, {"zone": "a"}, "n1")
