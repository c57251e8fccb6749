"""Which images the runtime has, without asking it forty times for forty pods.

An answer "present" is good for a second, and questions asked at the same time share one answer.
That is safe: between the answer and the container's creation the image may vanish at any time
anyway; creation then fails, the pod is tried again more than a second later, and the runtime is
asked anew. An answer "absent" is never kept, so that a pull by somebody else is seen at once.
"""

from __future__ import annotations

import asyncio
from typing import NamedTuple, Protocol

from pykubelet.cri import runtime_pb2 as pb
from pykubelet.images.shared import SharedCalls
from pykubelet.tasks import TaskScope

KEPT_SECONDS = 1.0

_RESERVED = ("kubernetes.io", "k8s.io")


class ImageService(Protocol):
    """The part of the runtime's image service that is used here."""

    async def image_status(self, image: pb.ImageSpec, *, verbose: bool = False) -> pb.ImageStatusResponse:
        """Ask for an image."""
        ...

    async def pull_image(
        self,
        image: pb.ImageSpec,
        auth: pb.AuthConfig | None = None,
        sandbox_config: pb.PodSandboxConfig | None = None,
    ) -> str:
        """Pull an image."""
        ...


class Selection(NamedTuple):
    """What decides which image a name stands for: equal selections have equal answers."""

    image: str
    runtime_handler: str
    annotations: frozenset[tuple[str, str]]

    @classmethod
    def of(cls, spec: pb.ImageSpec) -> Selection:
        """Take it from a request.

        A runtime may choose an image by a pod's annotations, but not by those of Kubernetes itself,
        which are different for each static pod.
        """
        chosen = frozenset((key, value) for key, value in spec.annotations.items() if not _is_reserved(key))
        return cls(spec.image, spec.runtime_handler, chosen)


class Presence:
    """What is known of the runtime's images."""

    def __init__(self, service: ImageService, tasks: TaskScope) -> None:
        self._service = service
        self._calls: SharedCalls[Selection, pb.Image | None] = SharedCalls(tasks, "image-status")
        self._known: dict[Selection, tuple[float, pb.Image]] = {}

    async def find(self, spec: pb.ImageSpec, *, fresh: bool = False) -> pb.Image | None:
        """Give the image, or None when the runtime does not have it; raises CriError.

        `fresh` takes no answer to an earlier question.
        """
        selection = Selection.of(spec)
        asked, image = self._known.get(selection, (0.0, None))
        if image is not None and not fresh and _now() - asked < KEPT_SECONDS:
            return image
        return await self._calls.run(selection, lambda: self._ask(selection, spec), fresh=fresh)

    def forget(self) -> None:
        """Ask for every image anew: some were removed."""
        self._known.clear()

    async def _ask(self, selection: Selection, spec: pb.ImageSpec) -> pb.Image | None:
        asked = _now()
        self._known = {key: item for key, item in self._known.items() if asked - item[0] < KEPT_SECONDS}
        self._known.pop(selection, None)
        answer = await self._service.image_status(spec)
        if not answer.HasField("image"):
            return None
        self._known[selection] = (asked, answer.image)
        return answer.image


def _is_reserved(annotation: str) -> bool:
    domain = annotation.partition("/")[0]
    return any(domain == reserved or domain.endswith(f".{reserved}") for reserved in _RESERVED)


def _now() -> float:
    return asyncio.get_running_loop().time()
