"""What is decided without asking anybody: names, versions, objects, growth, labels."""

import base64
import json
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pykubelet.api.meta import ObjectMeta, from_document, to_document
from pykubelet.api.quantity import Quantity
from pykubelet.api.storage import CsiDriverSpec, CsiNode, VolumeAttachment
from pykubelet.volumes.csi.csinode import (
    MIGRATED,
    MIGRATED_PLUGINS,
    NODE_IDS,
    TopologyCollision,
    belongs_to,
    blank_csi_node,
    install_patch,
    node_install_patch,
    node_uninstall_patch,
    uninstall_patch,
)
from pykubelet.volumes.csi.drivers import best_version
from pykubelet.volumes.csi.expansion import (
    ExpandingClaim,
    ExpansionPlan,
    decide,
    failed_patch,
    finished_patch,
    in_progress_patch,
)
from pykubelet.volumes.csi.names import attachment_name, inline_handle, unique_name
from pykubelet.volumes.csi.paths import CsiPaths
from pykubelet.volumes.csi.request_context import token_end
from pykubelet.volumes.csi.types import NodeFacts
from pykubelet.volumes.csi.volume import CsiVolume, applies_fs_group, must_attach
from pykubelet.volumes.csi.volume_attachments import AttachLimitExceeded, attachment_error
from pykubelet.volumes.errors import VolumeNotReady, VolumePluginError
from tests.support.csi import inline, make_pod, persistent
from tests.support.strategic import apply_patch


def test_names_equal_upstream() -> None:
    """By `printf '%s' vol-1d.example.comnode-a | sha256sum`."""
    assert attachment_name("vol-1", "d.example.com", "node-a") == (
        "csi-7405d2fa849678a3787716b8aba5f2a410fd6098d1e9d5885e361a1b83018520"
    )
    assert unique_name("d.example.com", "vol-1") == "kubernetes.io/csi/d.example.com^vol-1"
    assert inline_handle("u", "v").startswith("csi-")


@pytest.mark.parametrize(
    ("versions", "best"),
    [
        ([], None),
        (["1.0.0"], (1, 0, 0)),
        (["v1.2.0", "1.10.0", "1.9"], (1, 10, 0)),
        (["0.3.0"], None),
        (["2.0.0", "1.1.0"], (1, 1, 0)),
        (["2.0.0"], None),
        (["1"], None),
        (["one", " 1.5.0-rc1 "], (1, 5, 0)),
    ],
)
def test_best_version_returns_highest_supported(versions: list[str], best: tuple[int, ...] | None) -> None:
    assert best_version(versions) == best


@pytest.mark.parametrize("name", ["..", "a/b", "", "."])
def test_csi_paths_traversal_name_raises_value_error(name: str, tmp_path: Path) -> None:
    places = CsiPaths(tmp_path)
    for place in (
        lambda: places.staged(name, "h"),
        lambda: places.published("u", name),
        lambda: places.published(name, "v"),
        lambda: places.device(name),
    ):
        with pytest.raises(ValueError):
            place()


@given(st.text())
def test_csi_paths_staged_any_handle_is_below_driver_directory(handle: str) -> None:
    try:
        handle.encode()
    except UnicodeEncodeError:
        return
    place = CsiPaths(Path("/root")).staged("d", handle)
    assert place.parent.parent == Path("/root/plugins/kubernetes.io/csi/d")


# What the cluster is told

FACTS = NodeFacts("this", 9, {"b": "2", "a": "1"})


def patched(found: CsiNode, patch: dict[str, Any]) -> CsiNode:
    return from_document(CsiNode, apply_patch(to_document(found), patch))


def test_install_patch_and_uninstall_patch_update_csinode_drivers() -> None:
    blank = blank_csi_node("n", "uid-n")
    assert to_document(blank) == {
        "metadata": {
            "name": "n",
            "annotations": {MIGRATED: MIGRATED_PLUGINS},
            "ownerReferences": [{"apiVersion": "v1", "kind": "Node", "name": "n", "uid": "uid-n"}],
        },
        "spec": {"drivers": []},
    }
    one = patched(blank, install_patch(blank, "one", FACTS))
    two = patched(one, install_patch(one, "two", NodeFacts("that")))
    assert to_document(two)["spec"]["drivers"] == [
        {"name": "one", "nodeID": "this", "topologyKeys": ["a", "b"], "allocatable": {"count": 9}},
        {"name": "two", "nodeID": "that"},
    ]
    assert install_patch(two, "one", FACTS) == {}
    assert install_patch(two, "two", NodeFacts("that")) == {}
    less = patched(two, install_patch(two, "one", NodeFacts("this", 0, {"b": "2", "a": "1"})))
    assert less.spec.drivers[0].allocatable is None
    huge = patched(two, install_patch(two, "one", NodeFacts("this", 1 << 40)))
    assert huge.spec.drivers[0].allocatable is not None
    assert huge.spec.drivers[0].allocatable.count == 2**31 - 1
    gone = patched(two, uninstall_patch(two, "one"))
    assert [driver.name for driver in gone.spec.drivers] == ["two"]
    assert uninstall_patch(gone, "one") == {}


def test_belongs_to_csinode_of_other_node_returns_false() -> None:
    assert belongs_to(blank_csi_node("n", "uid-n"), "n", "uid-n")
    assert not belongs_to(blank_csi_node("n", "uid-n"), "n", "another")
    assert not belongs_to(CsiNode(), "n", "uid-n")


def test_node_install_patch_and_uninstall_patch_update_node_ids() -> None:
    assert node_install_patch(ObjectMeta(), "one", FACTS) == {
        "metadata": {"annotations": {NODE_IDS: '{"one":"this"}'}, "labels": {"b": "2", "a": "1"}}
    }
    meta = ObjectMeta(annotations={NODE_IDS: '{"one":"this"}'}, labels={"a": "1", "b": "2"})
    assert node_install_patch(meta, "one", FACTS) == {}
    assert node_install_patch(meta, "two", NodeFacts("that")) == {
        "metadata": {"annotations": {NODE_IDS: '{"one":"this","two":"that"}'}}
    }
    assert node_uninstall_patch(meta, "two") == {}
    assert node_uninstall_patch(meta, "one") == {"metadata": {"annotations": {NODE_IDS: None}}}
    with pytest.raises(TopologyCollision, match='driver reported "a":"3" but existing label is "a":"1"'):
        node_install_patch(meta, "one", NodeFacts("this", 0, {"a": "3"}))
    with pytest.raises(ValueError, match="failed to parse node's"):
        node_install_patch(ObjectMeta(annotations={NODE_IDS: "[1]"}), "one", FACTS)


# How a volume is had


def spec(**fields: Any) -> CsiDriverSpec:
    return from_document(CsiDriverSpec, fields)


@pytest.mark.parametrize(
    ("policy", "group", "source", "owns"),
    [
        ("File", 5, {}, True),
        ("File", None, {}, False),
        ("File", 5, {"read_only": True}, False),
        ("None", 5, {"fsType": "ext4"}, False),
        ("ReadWriteOnceWithFSType", 5, {"fsType": "ext4"}, True),
        ("ReadWriteOnceWithFSType", 5, {}, False),
        ("ReadWriteOnceWithFSType", 5, {"fsType": "ext4", "modes": ["ReadWriteMany"]}, False),
        ("ReadWriteOnceWithFSType", 5, {"fsType": "ext4", "modes": ["ReadWriteOncePod"]}, True),
        (None, 5, {"fsType": "ext4"}, True),
    ],
)
def test_applies_fs_group_follows_fs_group_policy(
    policy: str | None, group: int | None, source: dict[str, Any], owns: bool
) -> None:
    volume = CsiVolume.parse(persistent(make_pod(), **source))
    driver = spec(fsGroupPolicy=policy) if policy is not None else None
    assert applies_fs_group(volume, driver, group) is owns


def test_applies_fs_group_inline_volume_needs_fs_type() -> None:
    assert applies_fs_group(CsiVolume.parse(inline(make_pod(), fsType="ext4")), None, 5)
    assert not applies_fs_group(CsiVolume.parse(inline(make_pod())), None, 5)
    assert not applies_fs_group(CsiVolume.parse(inline(make_pod(), fsType="ext4", readOnly=True)), None, 5)


def test_must_attach_only_persistent_and_attach_required() -> None:
    volume = CsiVolume.parse(persistent(make_pod()))
    assert must_attach(volume, None)
    assert must_attach(volume, spec())
    assert not must_attach(volume, spec(attachRequired=False))
    assert not must_attach(CsiVolume.parse(inline(make_pod())), spec(attachRequired=True))


def test_csi_volume_parse_empty_driver_or_handle_raises() -> None:
    for wanted in (inline(make_pod(), driver=""), persistent(make_pod(), "")):
        with pytest.raises(VolumePluginError):
            CsiVolume.parse(wanted)


def test_attachment_error_returns_not_ready_or_limit_exceeded() -> None:
    def found(**fields: Any) -> VolumeAttachment:
        return from_document(VolumeAttachment, fields)

    assert attachment_error(found(status={"attached": True}), "h") is None
    going = found(metadata={"deletionTimestamp": "2026-01-01T00:00:00Z"}, status={"attached": True})
    assert isinstance(attachment_error(going, "h"), VolumeNotReady)
    full = found(status={"attached": False, "attachError": {"message": "full", "errorCode": 8}})
    assert isinstance(attachment_error(full, "h"), AttachLimitExceeded)


def test_token_end_returns_expiry_or_none() -> None:
    def token(claims: object) -> str:
        return f"x.{base64.urlsafe_b64encode(json.dumps(claims).encode()).decode().rstrip('=')}.y"

    assert token_end(token({"exp": 1767225600})) == "2026-01-01T00:00:00Z"
    extended = {"exp": 1798761600, "kubernetes.io": {"warnafter": 1767225607}}
    assert token_end(token(extended)) == "2026-01-01T00:00:07Z"
    for odd in ("", "opaque", "a.b.c", token([]), token({}), token({"exp": "soon"})):
        assert token_end(odd) is None


# Growth


def growing(
    capacity: str = "1Gi",
    allocated: str = "",
    status: str = "",
    modes: tuple[str, ...] = ("ReadWriteOnce",),
    **meta: Any,
) -> ExpandingClaim:
    document: dict[str, Any] = {
        "metadata": {"name": "claim", "uid": "u", "resourceVersion": "7", **meta},
        "spec": {"accessModes": list(modes), "resources": {"requests": {"storage": "2Gi"}}},
        "status": {"capacity": {"storage": capacity}},
    }
    if allocated:
        document["status"]["allocatedResources"] = {"storage": allocated}
    if status:
        document["status"]["allocatedResourceStatuses"] = {"storage": status}
    return from_document(ExpandingClaim, document)


TWO = Quantity.parse("2Gi")
SHARED = ("ReadWriteMany",)


@pytest.mark.parametrize(
    ("claim", "growth"),
    [
        (growing(), ExpansionPlan(TWO, report=True, legacy=True)),
        (growing("2Gi"), ExpansionPlan(TWO, legacy=True)),
        (growing(allocated="2Gi", status="NodeResizePending"), ExpansionPlan(TWO, mark=True, report=True)),
        (growing(allocated="2Gi", status="NodeResizeInProgress"), ExpansionPlan(TWO, mark=True, report=True)),
        (growing(allocated="2Gi", status="ControllerResizeInProgress"), ExpansionPlan(None)),
        (growing(allocated="2Gi", status="NodeResizeInfeasible"), ExpansionPlan(None)),
        (growing("2Gi", allocated="2Gi"), ExpansionPlan(None, complete=True)),
        (growing("2Gi", allocated="2Gi", modes=SHARED), ExpansionPlan(TWO)),
        (
            growing(
                "2Gi",
                allocated="2Gi",
                modes=SHARED,
                annotations={"volume.kubernetes.io/node-expansion-not-required": "true"},
            ),
            ExpansionPlan(None, complete=True),
        ),
        (growing(allocated="2Gi"), ExpansionPlan(None)),
    ],
)
def test_decide_claim_status_returns_expansion_plan(claim: ExpandingClaim, growth: ExpansionPlan) -> None:
    assert decide(claim, TWO) == growth


def test_expansion_patches_update_claim_status() -> None:
    claim = growing(allocated="2Gi", status="NodeResizePending")
    before = to_document(claim)
    before["status"]["conditions"] = [
        {"type": "FileSystemResizePending", "status": "True"},
        {"type": "Other", "status": "True"},
    ]
    claim = from_document(ExpandingClaim, before)
    assert in_progress_patch(claim) == {
        "metadata": {"resourceVersion": "7", "uid": "u"},
        "status": {"allocatedResourceStatuses": {"storage": "NodeResizeInProgress"}},
    }
    after = apply_patch(before, finished_patch(claim, TWO))
    assert after["status"]["capacity"] == {"storage": "2Gi"}
    assert after["status"]["allocatedResourceStatuses"] == {}
    assert after["status"]["conditions"] == [{"type": "Other", "status": "True"}]
    now = datetime(2026, 1, 2, tzinfo=UTC)
    said = failed_patch(claim, "no", now, infeasible=True)
    assert said == {
        "status": {
            "allocatedResourceStatuses": {"storage": "NodeResizeInfeasible"},
            "conditions": [
                {
                    "type": "NodeResizeError",
                    "status": "True",
                    "lastTransitionTime": "2026-01-02T00:00:00Z",
                    "message": "failed to expand pvc with no",
                }
            ],
        }
    }
    again = from_document(
        ExpandingClaim, apply_patch(before, failed_patch(claim, "no", now, infeasible=False))
    )
    assert failed_patch(again, "still no", now, infeasible=False) == {}, "it has been said"
    stage = {"allocatedResourceStatuses": {"storage": "NodeResizeInfeasible"}}
    assert failed_patch(again, "never", now, infeasible=True) == {"status": stage}
