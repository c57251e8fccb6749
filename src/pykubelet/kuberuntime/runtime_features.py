"""Features of the container runtime, which may be replaced by another version while pods run.

`RuntimeFeatures` owns the last Status and Version responses. The poll of the runtime's health goes through
its `status`; after a new connection to the runtime the version is requested as well, so that an upgrade or a
downgrade takes effect without a restart of the kubelet. Pods that run keep what they have; the next start of
a sandbox or container uses what the runtime has then.

A runtime reports some features in its status (user namespaces and recursive read-only mounts per handler,
`supplementalGroupsPolicy`); for the others its version is compared with the first one that has them. An
unknown runtime is assumed to have them.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from pykubelet.cri import runtime_pb2 as pb
from pykubelet.cri.connect import RuntimeConnection
from pykubelet.logs import get_logger

log = get_logger(__name__)
_NUMBERS = re.compile(r"v?(\d+)\.(\d+)")
CDI = "CDI devices"
USER_NAMESPACES = "user namespaces"
RECURSIVE_READ_ONLY = "recursive read-only mounts"
GROUPS_POLICY = "supplementalGroupsPolicy"
CHECKPOINTS = "container checkpoints"
IMAGE_VOLUMES = "image volumes"
FIRST_VERSIONS: Mapping[str, Mapping[str, tuple[int, int]]] = {
    CDI: {"containerd": (1, 7), "cri-o": (1, 23)},
    USER_NAMESPACES: {"containerd": (2, 0), "cri-o": (1, 25)},
    RECURSIVE_READ_ONLY: {"containerd": (2, 0), "cri-o": (1, 30)},
    GROUPS_POLICY: {"containerd": (2, 0), "cri-o": (1, 31)},
    CHECKPOINTS: {"containerd": (2, 0), "cri-o": (1, 25)},
    IMAGE_VOLUMES: {"containerd": (2, 1), "cri-o": (1, 31)},
}
"""First version (major, minor) of each runtime that has a feature, by the feature's name."""


def has_feature(feature: str, name: str, version: str) -> bool:
    """Return whether a runtime has a feature by its version; True for an unknown runtime or version."""
    first = FIRST_VERSIONS[feature].get(name)
    found = _NUMBERS.match(version)
    if first is None or found is None:
        return True
    return (int(found[1]), int(found[2])) >= first


def missing_by_version(name: str, version: str) -> list[str]:
    """Return the features that a version of a runtime does not have."""
    return [feature for feature in FIRST_VERSIONS if not has_feature(feature, name, version)]


def recursive_handlers(status: pb.StatusResponse) -> frozenset[str]:
    """Return the runtime handlers that support recursive read-only mounts; the default one is ""."""
    handlers = status.runtime_handlers
    return frozenset(handler.name for handler in handlers if handler.features.recursive_read_only_mounts)


class RuntimeFeatures:
    """Last known features of a runtime; `version` and `last_status` are its last responses."""

    def __init__(self, cri: RuntimeConnection) -> None:
        self._cri = cri
        self.version = cri.version
        self.last_status = pb.StatusResponse()
        self._connects = cri.runtime_channel.connects

    async def status(self) -> pb.StatusResponse:
        """Return the runtime's Status; also refresh the version after a new connection. Raises CriError."""
        response = await self._cri.runtime.status()
        self.last_status = response
        connects = self._cri.runtime_channel.connects
        if connects != self._connects:
            version = await self._cri.runtime.version()
            self._connects = connects
            if version.runtime_version != self.version.runtime_version:
                log.info(
                    "Container runtime was replaced, running pods are kept",
                    containerRuntime=version.runtime_name,
                    version=version.runtime_version,
                    previousVersion=self.version.runtime_version,
                )
                self.version = version
                self.log_missing()
            self.version = version
        return response

    def has_user_namespaces(self, handler: str) -> bool:
        """Return whether a runtime handler supports user namespaces; the default one is ""."""
        handlers = self.last_status.runtime_handlers
        return any(found.features.user_namespaces for found in handlers if found.name == handler)

    def recursive_handlers(self) -> frozenset[str]:
        """Return the runtime handlers that support recursive read-only mounts."""
        return recursive_handlers(self.last_status)

    def has_image_volumes(self) -> bool:
        """Return whether the runtime mounts image volumes; an older one would mount an empty directory."""
        return self._by_version(IMAGE_VOLUMES)

    def has_cdi(self) -> bool:
        """Return whether the runtime adds CDI devices to containers."""
        return self._by_version(CDI)

    def missing(self) -> list[str]:
        """Return the features that the runtime does not have, as it reports them or by its version."""
        reported = {
            USER_NAMESPACES: self.has_user_namespaces(""),
            RECURSIVE_READ_ONLY: "" in self.recursive_handlers(),
            GROUPS_POLICY: self.last_status.features.supplemental_groups_policy,
        }
        return [
            feature
            for feature in FIRST_VERSIONS
            if not (reported[feature] if feature in reported else self._by_version(feature))
        ]

    def log_missing(self) -> None:
        """Log the features that the runtime does not have, if any."""
        if missing := self.missing():
            log.info(
                "Container runtime lacks features, pods that need them fail: use a newer one",
                containerRuntime=self.version.runtime_name,
                version=self.version.runtime_version,
                missing=missing,
            )

    def _by_version(self, feature: str) -> bool:
        return has_feature(feature, self.version.runtime_name, self.version.runtime_version)
