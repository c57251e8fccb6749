"""Images that a container needs before its start: its own, and those of its image volumes.

Called by the container starter and the config builder. Each failure becomes a `StartError` with the waiting
reason of the image manager, after an event. Pulls in progress are owned by the image manager.
"""

from __future__ import annotations

from collections.abc import Mapping

from pykubelet.api.pod import Container, Pod
from pykubelet.cri import runtime_pb2 as pb
from pykubelet.images.credentials import pull_secrets
from pykubelet.images.image_manager import ImageManager, PresentImage
from pykubelet.images.puller import ImageError
from pykubelet.kuberuntime.configuration.options import mounted_image_volumes
from pykubelet.kuberuntime.errors import StartError
from pykubelet.objects.base import NoObjects, PodObjects
from pykubelet.podconfig.pod_history import PodHistory, field_of
from pykubelet.volumes.plugin import MountedVolume


class ContainerImages:
    """Ensures that the images of containers are present."""

    def __init__(self, images: ImageManager, history: PodHistory, objects: PodObjects | None = None) -> None:
        """Initialize with the source of pull secrets, None without an API server."""
        self._images = images
        self._history = history
        self._objects = objects or NoObjects()

    async def ensure(self, pod: Pod, container: Container, sandbox: pb.PodSandboxConfig) -> PresentImage:
        """Ensure that the container's image is present. Raises StartError after recording an event."""
        secrets = await pull_secrets(pod, self._objects, self._history)
        try:
            return await self._images.ensure(pod, container, sandbox, secrets)
        except ImageError as err:
            self._failed(pod, container, err.reason)
            raise StartError(err.reason, err.message, err.retry_after) from err

    async def ensure_volumes(
        self,
        pod: Pod,
        container: Container,
        volumes: Mapping[str, MountedVolume],
        sandbox: pb.PodSandboxConfig,
    ) -> dict[str, pb.ImageSpec]:
        """Ensure that a container's image volumes are present; return them by volume. Raises StartError."""
        images = mounted_image_volumes(pod, container, volumes)
        if not images:
            return {}
        secrets = await pull_secrets(pod, self._objects, self._history)
        found = {}
        for name, (image, policy) in images.items():
            try:
                present = await self._images.ensure_image(
                    pod, image, policy, sandbox, secrets, where=field_of(pod, container.name)
                )
            except ImageError as err:
                message = f"volume {name}: {err.message}"
                self._failed(pod, container, message)
                raise StartError(err.reason, message, err.retry_after) from err
            found[name] = pb.ImageSpec(image=present.id, user_specified_image=image)
        return found

    def _failed(self, pod: Pod, container: Container, message: str) -> None:
        self._history.event(pod, "Warning", "Failed", f"Error: {message}", field_of(pod, container.name))
