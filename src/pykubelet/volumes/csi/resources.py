"""The kinds of API objects that CSI needs."""

from __future__ import annotations

from pykubelet.api.storage import CsiDriver, CsiNode, VolumeAttachment
from pykubelet.kube.resources import Resource

_GROUP = "storage.k8s.io"

CSI_DRIVERS = Resource(CsiDriver, "CSIDriver", "csidrivers", _GROUP, namespaced=False)
CSI_NODES = Resource(CsiNode, "CSINode", "csinodes", _GROUP, namespaced=False)
ATTACHMENTS = Resource(VolumeAttachment, "VolumeAttachment", "volumeattachments", _GROUP, namespaced=False)
