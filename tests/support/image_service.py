"""A runtime's image service in memory, for what needs a clock of its own; and pods to pull for."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

from pykubelet.api.meta import ObjectMeta
from pykubelet.api.pod import Container, Pod, PodSpec
from pykubelet.cri import runtime_pb2 as pb
from pykubelet.transport.errors import CriError


@dataclass
class FakeImages:
    """Pulls whatever `offered` has, after `pull_seconds`."""

    offered: dict[str, pb.Image] = field(default_factory=dict)
    present: dict[str, pb.Image] = field(default_factory=dict)
    pull_seconds: float = 0.0
    status_seconds: float = 0.0
    broken: CriError | None = None
    """Why nothing can be inspected."""
    logins: set[tuple[str, str]] | None = None
    """Who may pull; None: everybody."""
    statuses: list[pb.ImageSpec] = field(default_factory=list)
    pulls: list[pb.PullImageRequest] = field(default_factory=list)
    pulling: int = 0
    most_pulling: int = 0
    given_up: int = 0
    lists: int = 0
    broken_list: CriError | None = None
    """Why images cannot be listed."""
    removed: list[pb.ImageSpec] = field(default_factory=list)
    remove_seconds: float = 0.0
    broken_removals: dict[str, CriError] = field(default_factory=dict)
    """Errors of RemoveImage by image id."""
    fs_info: pb.ImageFsInfoResponse | CriError = field(default_factory=lambda: image_fs("/images"))

    async def list_images(self) -> list[pb.Image]:
        self.lists += 1
        if self.broken_list is not None:
            raise self.broken_list
        return list(self.present.values())

    async def image_status(self, image: pb.ImageSpec, *, verbose: bool = False) -> pb.ImageStatusResponse:
        self.statuses.append(image)
        await asyncio.sleep(self.status_seconds)
        if self.broken is not None:
            raise self.broken
        return pb.ImageStatusResponse(image=self.present.get(image.image))

    async def pull_image(
        self,
        image: pb.ImageSpec,
        auth: pb.AuthConfig | None = None,
        sandbox_config: pb.PodSandboxConfig | None = None,
    ) -> str:
        self.pulls.append(pb.PullImageRequest(image=image, auth=auth, sandbox_config=sandbox_config))
        self.pulling += 1
        self.most_pulling = max(self.pulling, self.most_pulling)
        try:
            await asyncio.sleep(self.pull_seconds)
        except asyncio.CancelledError:
            self.given_up += 1
            raise
        finally:
            self.pulling -= 1
        if self.logins is not None and (auth is None or (auth.username, auth.password) not in self.logins):
            who = auth.username if auth is not None else "nobody"
            raise CriError("PullImage", "Unknown", f"unauthorized: {who}")
        if image.image not in self.offered:
            raise CriError("PullImage", "NotFound", f"{image.image}: not found")
        self.present[image.image] = self.offered[image.image]
        return self.present[image.image].id

    async def remove_image(self, image: pb.ImageSpec) -> None:
        await asyncio.sleep(self.remove_seconds)
        if (broken := self.broken_removals.get(image.image)) is not None:
            raise broken
        self.removed.append(image)
        self.present = {
            name: item
            for name, item in self.present.items()
            if item.id != image.image
            or item.spec.runtime_handler != (image.runtime_handler or item.spec.runtime_handler)
        }

    async def image_fs_info(self) -> pb.ImageFsInfoResponse:
        if isinstance(self.fs_info, CriError):
            raise self.fs_info
        return self.fs_info


@dataclass
class FakeContainers:
    """A runtime service with containers, for garbage collection of images."""

    containers: list[pb.Container] = field(default_factory=list)
    mounts: dict[str, list[pb.Mount]] = field(default_factory=dict)
    """Mounts by container id."""
    broken_list: CriError | None = None
    broken_status: CriError | None = None
    statuses: list[str] = field(default_factory=list)

    async def list_containers(self) -> list[pb.Container]:
        if self.broken_list is not None:
            raise self.broken_list
        return list(self.containers)

    async def container_status(self, container_id: str) -> pb.ContainerStatusResponse:
        self.statuses.append(container_id)
        if self.broken_status is not None:
            raise self.broken_status
        status = pb.ContainerStatus(id=container_id, mounts=self.mounts.get(container_id, []))
        return pb.ContainerStatusResponse(status=status)


def image_fs(*mount_points: str) -> pb.ImageFsInfoResponse:
    """Return the file systems of images, and another one of containers."""
    images = [pb.FilesystemUsage(fs_id=pb.FilesystemIdentifier(mountpoint=path)) for path in mount_points]
    containers = [pb.FilesystemUsage(fs_id=pb.FilesystemIdentifier(mountpoint="/containers"))]
    return pb.ImageFsInfoResponse(image_filesystems=images, container_filesystems=containers)


def an_image(name: str, *, size: int = 4096, uid: int | None = None, username: str = "") -> pb.Image:
    value = pb.Int64Value(value=uid) if uid is not None else None
    return pb.Image(id=f"sha256:{name}", repo_tags=[name], size=size, uid=value, username=username)


def a_pod(
    image: str, policy: str = "IfNotPresent", *, uid: str = "uid-1", annotations: dict[str, str] | None = None
) -> Pod:
    """A pod with one container `main`."""
    return Pod(
        metadata=ObjectMeta(name=f"pod-{uid}", namespace="default", uid=uid, annotations=annotations or {}),
        spec=PodSpec(containers=[Container(name="main", image=image, image_pull_policy=policy)]),
    )


def a_sandbox(pod: Pod) -> pb.PodSandboxConfig:
    meta = pod.metadata
    return pb.PodSandboxConfig(
        metadata=pb.PodSandboxMetadata(name=meta.name, uid=meta.uid, namespace=meta.namespace)
    )
