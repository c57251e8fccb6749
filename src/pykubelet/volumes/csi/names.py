"""Names that kubelet, controllers and drivers must derive identically, and the API resources of CSI."""

from __future__ import annotations

import hashlib

from pykubelet.api.storage import CsiDriver, CsiNode, VolumeAttachment
from pykubelet.apiserver.client import Resource

KIND = "kubernetes.io/csi"
PLUGIN_DIR = "kubernetes.io~csi"
"""Directory of CSI volumes in a pod's `volumes`."""
STAGE_UNSTAGE = "STAGE_UNSTAGE_VOLUME"
GET_STATS = "GET_VOLUME_STATS"
EXPAND = "EXPAND_VOLUME"
CONDITION = "VOLUME_CONDITION"
SINGLE_NODE_MULTI_WRITER = "SINGLE_NODE_MULTI_WRITER"
MOUNT_GROUP = "VOLUME_MOUNT_GROUP"
EPHEMERAL = "Ephemeral"
PERSISTENT = "Persistent"
MIGRATED = {
    "awsElasticBlockStore": "ebs.csi.aws.com",
    "azureDisk": "disk.csi.azure.com",
    "azureFile": "file.csi.azure.com",
    "cinder": "cinder.csi.openstack.org",
    "gcePersistentDisk": "pd.csi.storage.gke.io",
    "portworxVolume": "pxd.portworx.com",
    "vsphereVolume": "csi.vsphere.vmware.com",
}
"""CSI driver of each in-tree volume type that is translated (`translation.py`)."""


def attachment_name(handle: str, driver: str, node: str) -> str:
    """Return the name of the VolumeAttachment of a volume and a node."""
    return f"csi-{_digest(f'{handle}{driver}{node}')}"


def inline_handle(uid: str, volume: str) -> str:
    """Return the volume handle of an ephemeral inline volume."""
    return f"csi-{_digest(f'{uid}{volume}')}"


def unique_name(driver: str, handle: str) -> str:
    """Return the name of a volume in the node's `volumesInUse` and `volumesAttached`."""
    return f"{KIND}/{driver}^{handle}"


def staging_dir_name(handle: str) -> str:
    """Return the name of the directory in which a volume is staged."""
    return _digest(handle)


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


_GROUP = "storage.k8s.io"
CSI_DRIVERS = Resource(CsiDriver, "CSIDriver", "csidrivers", _GROUP, namespaced=False)
CSI_NODES = Resource(CsiNode, "CSINode", "csinodes", _GROUP, namespaced=False)
ATTACHMENTS = Resource(VolumeAttachment, "VolumeAttachment", "volumeattachments", _GROUP, namespaced=False)
