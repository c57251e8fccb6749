"""Translation of in-tree volumes to the CSI volumes of the drivers that replaced them; pure functions.

Older clusters have PersistentVolumes with in-tree sources, and some pods contain such sources inline. The
scheduler and the attach/detach controller translate them independently, so the node must compute exactly the
same volume handle: the names of the VolumeAttachment and in `status.volumesInUse` are derived from it.

The node affinity is translated as well. Old PersistentVolumes specify their topology by the general zone and
region labels, in their node affinity or, if it contains none, in labels of their own. Nodes have the topology
labels of their drivers and possibly the GA labels, but not the beta labels.

Imported when the first such volume occurs, because most nodes never see one.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

import msgspec

from pykubelet.api.meta import ObjectStruct, from_document
from pykubelet.api.pod import Pod
from pykubelet.api.selector import NodeRequirement, NodeSelector, NodeSelectorTerm
from pykubelet.api.storage import READ_ONLY_MANY, READ_WRITE_ONCE, PersistentVolume, VolumeNodeAffinity
from pykubelet.api.volume import CsiPersistent, SecretReference, Volume
from pykubelet.volumes.csi.names import MIGRATED
from pykubelet.volumes.errors import VolumePluginError
from pykubelet.volumes.plugin import VolumeToMount

ZONE, REGION = "topology.kubernetes.io/zone", "topology.kubernetes.io/region"
BETA_ZONE = "failure-domain.beta.kubernetes.io/zone"
BETA_REGION = "failure-domain.beta.kubernetes.io/region"
_SEPARATOR = "__"


@dataclass(frozen=True, slots=True)
class ZoneKeys:
    """Label keys of a driver for zones and regions; empty for a driver without such labels."""

    zone: str = ""
    region: str = ""


NO_ZONES = ZoneKeys()


def zones_of(labels: Mapping[str, str]) -> list[str]:
    """Return the zones in a volume's own labels."""
    return [zone for zone in (labels.get(BETA_ZONE) or labels.get(ZONE, "")).split(_SEPARATOR) if zone]


def migrated_affinity(
    affinity: VolumeNodeAffinity | None, labels: Mapping[str, str], keys: ZoneKeys
) -> VolumeNodeAffinity | None:
    """Return a volume's node affinity with its driver's label keys; unchanged for a driver without them."""
    if not keys.zone:
        return affinity
    terms = list(affinity.required.node_selector_terms) if affinity and affinity.required else []
    zone, region = _topology_keys(terms, labels)
    terms = _replace_key(terms, zone, keys.zone, _split(labels.get(zone, ""), several=not keys.region))
    if keys.region:
        terms = _replace_key(terms, region, keys.region, _split(labels.get(region, ""), several=False))
    elif region == BETA_REGION:
        terms = _replace_key(terms, region, REGION, ())
    return VolumeNodeAffinity(required=NodeSelector(node_selector_terms=terms)) if terms else affinity


def _topology_keys(terms: list[NodeSelectorTerm], labels: Mapping[str, str]) -> tuple[str, str]:
    """Return the general zone and region label keys that the volume uses, GA or beta."""
    named = {part.key for term in terms for part in term.match_expressions}
    for known in (named, labels):
        if ZONE in known:
            return ZONE, REGION
        if BETA_ZONE in known:
            return BETA_ZONE, BETA_REGION
    return ZONE, REGION


def _replace_key(
    terms: list[NodeSelectorTerm], old: str, new: str, default_values: tuple[str, ...]
) -> list[NodeSelectorTerm]:
    """Rename a requirement's key; if no term has it, add one with `default_values` to all terms."""
    if any(part.key == old and part.values for term in terms for part in term.match_expressions):
        return [
            msgspec.structs.replace(
                term,
                match_expressions=[
                    msgspec.structs.replace(part, key=new) if part.key == old else part
                    for part in term.match_expressions
                ],
            )
            for term in terms
        ]
    if not default_values:
        return terms
    more = NodeRequirement(key=new, operator="In", values=list(default_values))
    return [
        msgspec.structs.replace(term, match_expressions=[*term.match_expressions, more])
        for term in terms or [NodeSelectorTerm()]
    ]


def _split(label: str, *, several: bool) -> tuple[str, ...]:
    parts = label.split(_SEPARATOR) if several else [label]
    return tuple(sorted({part.strip() for part in parts if part.strip()}))


READ_WRITE_MANY = "ReadWriteMany"
RESOURCE_GROUP = "kubernetes.io/azure-file-resource-group"
PORTWORX_SECRET = ("openstorage.io/auth-secret-name", "openstorage.io/auth-secret-namespace")
_UNSPECIFIED = "UNSPECIFIED"
"""Placeholder that the GCE PD driver resolves itself."""


class MigrationError(VolumePluginError):
    """Raised for an in-tree volume that has no equivalent in its CSI driver."""

    def __init__(self, reason: str) -> None:
        super().__init__(f"failed to translate in-tree pv to CSI: {reason}")


def migrated_volume(found: PersistentVolume) -> PersistentVolume:
    """Return an in-tree PersistentVolume as its driver's CSI volume; all others are returned unchanged.

    Raises VolumePluginError if its driver has no equivalent, and ValueError if its source is malformed.
    """
    ((wire, source),) = found.spec.sources if len(found.spec.sources) == 1 else (("", None),)
    kind = _KINDS.get(wire)
    if kind is None:
        return found
    metadata = _VolumeMetadata(
        found.metadata.name,
        found.spec.claim_ref.namespace if found.spec.claim_ref is not None else "",
        found.metadata.labels,
        found.metadata.annotations,
    )
    spec = msgspec.structs.replace(
        found.spec,
        csi=kind.read(from_document(kind.source, source), metadata),
        access_modes=kind.modes(found.spec.access_modes),
        node_affinity=migrated_affinity(found.spec.node_affinity, metadata.labels, kind.zones),
        **{kind.field: None},
    )
    return msgspec.structs.replace(found, spec=spec)


def migrated_inline_volume(pod: Pod, volume: Volume) -> VolumeToMount:
    """Return a pod's inline in-tree volume as its driver's CSI volume. Raises as `migrated_volume` does."""
    ((wire, written),) = volume.sources
    kind = _KINDS[wire]
    source = from_document(kind.source, written)
    read = kind.read(source, _VolumeMetadata(volume.name, pod.metadata.namespace or "default"))
    found = PersistentVolume()
    found.metadata.name = kind.inline_name(read)
    found.spec.csi = read
    found.spec.access_modes = [kind.inline_mode(source)]
    # The directory name; upstream replaces a slash in the same way.
    name = found.metadata.name.replace("/", "~")
    return VolumeToMount(pod, volume, "csi", read, name, persistent=found)


@dataclass(frozen=True, slots=True)
class _VolumeMetadata:
    """Metadata of a volume besides its source; the namespace is that of its claim or its pod."""

    name: str
    namespace: str
    labels: Mapping[str, str] = field(default_factory=dict)
    annotations: Mapping[str, str] = field(default_factory=dict)


class _Ebs(ObjectStruct):
    volume_id: str = msgspec.field(name="volumeID", default="")
    fs_type: str = ""
    partition: int = 0
    read_only: bool = False


class _Gce(ObjectStruct):
    pd_name: str = ""
    fs_type: str = ""
    partition: int = 0
    read_only: bool = False


class _AzureDisk(ObjectStruct):
    disk_uri: str = msgspec.field(name="diskURI", default="")
    caching_mode: str | None = None
    fs_type: str | None = None
    read_only: bool | None = None
    kind: str | None = None


class _AzureFile(ObjectStruct):
    secret_name: str = ""
    share_name: str = ""
    read_only: bool = False
    secret_namespace: str | None = None


class _VolumeIdSource(ObjectStruct):
    """Source of a Cinder or Portworx volume."""

    volume_id: str = msgspec.field(name="volumeID", default="")
    fs_type: str = ""
    read_only: bool = False


class _Vsphere(ObjectStruct):
    volume_path: str = ""
    fs_type: str = ""
    storage_policy_name: str = ""


def _ebs(source: _Ebs, _: _VolumeMetadata) -> CsiPersistent:
    handle = source.volume_id
    if handle.startswith("aws://"):
        handle = urlsplit(handle).path.strip("/")
        if not re.fullmatch(r"vol-[^/]*", handle):
            raise MigrationError(
                "failed to translate Kubernetes ID to EBS Volume ID "
                f"Invalid format for AWS volume ({source.volume_id})"
            )
    return CsiPersistent(
        driver=MIGRATED["awsElasticBlockStore"],
        volume_handle=handle,
        read_only=source.read_only,
        fs_type=source.fs_type,
        volume_attributes={"partition": str(source.partition)},
    )


def _gce(source: _Gce, metadata: _VolumeMetadata) -> CsiPersistent:
    zones = zones_of(metadata.labels)
    where = f"zones/{zones[0] if zones else _UNSPECIFIED}"
    if len(zones) > 1:
        regions = {zone.rpartition("-")[0] for zone in zones if zone.count("-") == 2}
        if len(regions) != 1 or any(zone.count("-") != 2 for zone in zones):
            raise MigrationError(f"failed to get region from zones: {', '.join(zones)}")
        where = f"regions/{regions.pop()}"
    return CsiPersistent(
        driver=MIGRATED["gcePersistentDisk"],
        volume_handle=f"projects/{_UNSPECIFIED}/{where}/disks/{source.pd_name}",
        read_only=source.read_only,
        fs_type=source.fs_type,
        volume_attributes={"partition": str(source.partition) if source.partition else ""},
    )


def _azure_disk(source: _AzureDisk, _: _VolumeMetadata) -> CsiPersistent:
    if source.kind is not None and source.kind.lower() != "managed":
        raise MigrationError(f"kind({source.kind}) is not supported in csi migration")
    attributes = {"kind": "Managed"}
    if source.caching_mode:
        attributes["cachingmode"] = source.caching_mode
    if source.fs_type is not None:
        attributes["fstype"] = source.fs_type
    return CsiPersistent(
        driver=MIGRATED["azureDisk"],
        volume_handle=source.disk_uri,
        read_only=source.read_only is True,
        fs_type=source.fs_type or "",
        volume_attributes=attributes,
    )


def _azure_file(source: _AzureFile, metadata: _VolumeMetadata) -> CsiPersistent:
    named = re.search(r"azure-storage-account-(.+)-secret", source.secret_name)
    account = named[1] if named else source.secret_name
    namespace = metadata.namespace if source.secret_namespace is None else source.secret_namespace
    if not namespace:
        raise MigrationError("could not find a secret namespace in PersistentVolumeSource or ClaimRef")
    group = metadata.annotations.get(RESOURCE_GROUP, "")
    return CsiPersistent(
        driver=MIGRATED["azureFile"],
        volume_handle="#".join((group, account, source.share_name, metadata.name, namespace)),
        read_only=source.read_only,
        volume_attributes={"sharename": source.share_name},
        node_stage_secret_ref=SecretReference(name=source.secret_name, namespace=namespace),
    )


def _cinder(source: _VolumeIdSource, _: _VolumeMetadata) -> CsiPersistent:
    return CsiPersistent(
        driver=MIGRATED["cinder"],
        volume_handle=source.volume_id,
        read_only=source.read_only,
        fs_type=source.fs_type,
    )


def _portworx(source: _VolumeIdSource, metadata: _VolumeMetadata) -> CsiPersistent:
    secret = None
    if all(key in metadata.annotations for key in PORTWORX_SECRET):
        name, namespace = (metadata.annotations[key] for key in PORTWORX_SECRET)
        secret = SecretReference(name=name, namespace=namespace)
    return CsiPersistent(
        driver=MIGRATED["portworxVolume"],
        volume_handle=source.volume_id,
        fs_type=source.fs_type,
        controller_publish_secret_ref=secret,
        node_stage_secret_ref=secret,
        node_publish_secret_ref=secret,
        node_expand_secret_ref=secret,
    )


def _vsphere(source: _Vsphere, _: _VolumeMetadata) -> CsiPersistent:
    policy = source.storage_policy_name
    return CsiPersistent(
        driver=MIGRATED["vsphereVolume"],
        volume_handle=source.volume_path,
        fs_type=source.fs_type,
        volume_attributes={"storagepolicyname": policy} if policy else {},
    )


def _google_modes(modes: list[str]) -> list[str]:
    """Return the effective access modes: a GCE PD never has several writers, whatever the volume lists."""
    if not modes:
        return modes
    return [READ_ONLY_MANY if set(modes) == {READ_ONLY_MANY} else READ_WRITE_ONCE]


def _mode_by_read_only(source: _Gce | _VolumeIdSource) -> str:
    return READ_ONLY_MANY if source.read_only else READ_WRITE_ONCE


def _name_by_driver(source: CsiPersistent) -> str:
    return f"{source.driver}-{source.volume_handle}"


@dataclass(frozen=True, slots=True)
class _Kind:
    field: str
    source: type[ObjectStruct]
    read: Callable[[Any, _VolumeMetadata], CsiPersistent]
    zones: ZoneKeys = NO_ZONES
    modes: Callable[[list[str]], list[str]] = lambda modes: modes
    inline_mode: Callable[[Any], str] = lambda source: READ_WRITE_ONCE
    inline_name: Callable[[CsiPersistent], str] = _name_by_driver
    """Returns the name of an inline volume, which must be unique per disk."""


_KINDS = {
    "awsElasticBlockStore": _Kind(
        "aws_elastic_block_store", _Ebs, _ebs, ZoneKeys("topology.ebs.csi.aws.com/zone")
    ),
    "azureDisk": _Kind(
        "azure_disk", _AzureDisk, _azure_disk, inline_name=lambda source: source.volume_handle
    ),
    "azureFile": _Kind(
        "azure_file",
        _AzureFile,
        _azure_file,
        inline_mode=lambda source: READ_WRITE_MANY,
        inline_name=lambda source: source.volume_handle,
    ),
    "cinder": _Kind("cinder", _VolumeIdSource, _cinder, ZoneKeys("topology.cinder.csi.openstack.org/zone")),
    "gcePersistentDisk": _Kind(
        "gce_persistent_disk",
        _Gce,
        _gce,
        ZoneKeys("topology.gke.io/zone"),
        modes=_google_modes,
        inline_mode=_mode_by_read_only,
        inline_name=lambda source: f"{source.driver}-{source.volume_handle.rpartition('/')[2]}",
    ),
    "portworxVolume": _Kind("portworx_volume", _VolumeIdSource, _portworx, inline_mode=_mode_by_read_only),
    "vsphereVolume": _Kind(
        "vsphere_volume",
        _Vsphere,
        _vsphere,
        ZoneKeys("topology.csi.vmware.com/zone", "topology.csi.vmware.com/region"),
    ),
}
