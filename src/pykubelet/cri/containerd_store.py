"""containerd's content and image services: downloads in progress, blobs, and labels of images.

CRI reports neither the progress of a pull nor sets labels. Both services are on the CRI socket of
containerd 1.6 and later; another runtime returns Unimplemented. All methods raise CriError.

What a registry controls is bounded: the number of blobs that are listed, and the size of a blob that is read.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import aclosing
from dataclasses import dataclass

from pykubelet.cri.channel import Channel
from pykubelet.cri.containerd import CRI_NAMESPACE
from pykubelet.cri.containerd_images_pb2 import (
    FieldMask,
    Image,
    ListImagesRequest,
    ListImagesResponse,
    UpdateImageRequest,
    UpdateImageResponse,
)
from pykubelet.cri.content_pb2 import (
    Info,
    ListContentRequest,
    ListContentResponse,
    ListStatusesRequest,
    ListStatusesResponse,
    ReadContentRequest,
    ReadContentResponse,
)
from pykubelet.transport.errors import BadResponse

_CONTENT = "/containerd.services.content.v1.Content/"
_IMAGES = "/containerd.services.images.v1.Images/"
_SECONDS = 5.0
PINNED_LABEL = "io.cri-containerd.pinned"
"""Label with which containerd 1.7 and later report an image as pinned."""
PINNED = "pinned"
"""Value of the label."""


@dataclass(frozen=True, slots=True)
class Ingest:
    """A blob that is being received."""

    ref: str
    """Name that the client chose, such as `layer-sha256:…`."""
    received: int
    """Bytes received so far."""


@dataclass(frozen=True, slots=True)
class Blob:
    """A blob of the content store."""

    digest: str
    size: int
    created: float
    """Seconds since the epoch, by containerd's clock."""


class ContainerdStore:
    """Client of the content and image services of a containerd; it owns no state."""

    def __init__(self, channel: Channel, namespace: str = CRI_NAMESPACE) -> None:
        self._channel = channel
        self._headers = [("containerd-namespace", namespace)]

    async def list_ingests(self) -> list[Ingest]:
        """Return the blobs that are being received, or whose reception was interrupted."""
        response = await self._channel.call(
            f"{_CONTENT}ListStatuses",
            ListStatusesRequest(),
            ListStatusesResponse,
            timeout=_SECONDS,
            headers=self._headers,
        )
        return [Ingest(status.ref, status.offset) for status in response.statuses]

    async def list_blobs(self, filters: Sequence[str], limit: int) -> list[Blob]:
        """Return the blobs that match one of the filters, at most `limit`."""
        found: list[Blob] = []
        request = ListContentRequest(filters=filters)
        parts = self._channel.stream(
            f"{_CONTENT}List", request, ListContentResponse, timeout=_SECONDS, headers=self._headers
        )
        async with aclosing(parts):
            async for part in parts:
                found += [_blob(info) for info in part.info]
                if len(found) >= limit:
                    break
        return found[:limit]

    async def read_blob(self, digest: str, max_bytes: int) -> bytes:
        """Return the content of a blob. Raises BadResponse when it is larger than `max_bytes`."""
        data = bytearray()
        request = ReadContentRequest(digest=digest, size=max_bytes)
        parts = self._channel.stream(
            f"{_CONTENT}Read", request, ReadContentResponse, timeout=_SECONDS, headers=self._headers
        )
        async with aclosing(parts):
            async for part in parts:
                data += part.data
                if len(data) > max_bytes:
                    raise BadResponse("Read", f"the blob has more than {max_bytes} bytes")
        return bytes(data)

    async def list_images(self, names: Iterable[str] = ()) -> list[Image]:
        """Return the images with these names, or all."""
        request = ListImagesRequest(filters=[f"name=={_quoted(name)}" for name in names])
        response = await self._channel.call(
            f"{_IMAGES}List", request, ListImagesResponse, timeout=_SECONDS, headers=self._headers
        )
        return list(response.images)

    async def set_pinned(self, names: Iterable[str], *, pinned: bool) -> None:
        """Set or remove the label of pinned images on those of the names that exist."""
        if not (chosen := frozenset(names)):
            return
        for image in await self.list_images(chosen):
            if (image.labels.get(PINNED_LABEL) == PINNED) == pinned:
                continue
            changed = Image(name=image.name, target=image.target, labels=image.labels)
            changed.labels.pop(PINNED_LABEL, None)
            if pinned:
                changed.labels[PINNED_LABEL] = PINNED
            mask = FieldMask(paths=[f"labels.{PINNED_LABEL}"] if pinned else ["labels"])
            await self._channel.call(
                f"{_IMAGES}Update",
                UpdateImageRequest(image=changed, update_mask=mask),
                UpdateImageResponse,
                timeout=_SECONDS,
                headers=self._headers,
            )


def _blob(info: Info) -> Blob:
    return Blob(info.digest, info.size, info.created_at.seconds + info.created_at.nanos / 1e9)


def _quoted(text: str) -> str:
    """Quote a value of a filter."""
    return '"' + text.replace("\\", "\\\\").replace('"', '\\"') + '"'
