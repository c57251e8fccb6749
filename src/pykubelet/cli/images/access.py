"""Access to the images of a node: connection to its runtime, and selection of images by name or id.

Images belong to the runtime, so most commands call it directly and work while the kubelet is stopped.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import NoReturn

from prometheus_client import CollectorRegistry

from pykubelet.api.duration import Duration
from pykubelet.cli.client import KubeletNotRunning, run_command
from pykubelet.cli.node_access import Node, select_node
from pykubelet.cli.options import NodeSelection
from pykubelet.cli.printers import escape_unprintable
from pykubelet.cri import runtime_pb2 as pb
from pykubelet.cri.channel import CriMetrics
from pykubelet.cri.connect import RuntimeConnection, connect
from pykubelet.images.archive import ArchiveError
from pykubelet.images.image_gc import find_images_in_use, image_key
from pykubelet.images.image_reference import InvalidImageName, parse_image_name
from pykubelet.images.importer import ImportFailed
from pykubelet.images.pins import PinError, PinRecord
from pykubelet.images.puller import PullFailed
from pykubelet.transport.errors import ConnectError, CriError, NotFound
from pykubelet.util.text import quoted

CALL_SECONDS = 30.0
"""Deadline of calls to the runtime, other than pulls."""
CONNECT_SECONDS = 10.0
MIN_ID_CHARACTERS = 4
_MAX_CANDIDATES = 10
EXPECTED = (CriError, ArchiveError, ImportFailed, PinError, InvalidImageName, PullFailed)
"""Failures that are one line."""


class ImageSelectionError(Exception):
    """Raised when no image matches, or several do."""


@dataclass(frozen=True, slots=True)
class NodeImages:
    """The runtime of a node and its record of pins."""

    node: Node
    cri: RuntimeConnection
    pins: PinRecord


def run_on_images(
    program: str, selection: NodeSelection, work: Callable[[NodeImages], Awaitable[int]]
) -> int:
    """Run `work` with a connection to the node's runtime; return the exit code."""

    async def connected() -> int:
        async with node_images(select_node(selection)) as images:
            return await work(images)

    return run_command(program, lambda: asyncio.run(connected()), *EXPECTED, ImageSelectionError)


@asynccontextmanager
async def node_images(node: Node) -> AsyncIterator[NodeImages]:
    """Connect to the runtime of a node. Raises ConnectError and NodeError."""
    try:
        connection = await connect(
            node.endpoint,
            node.image_endpoint,
            timeout=Duration.from_seconds(CALL_SECONDS),
            connect_timeout=Duration.from_seconds(CONNECT_SECONDS),
            metrics=CriMetrics(CollectorRegistry()),
        )
    except ConnectError:
        # A private runtime ends with its node.
        if node.instance is not None and not node.is_running():
            raise KubeletNotRunning(f"no node runs on {node.title}: {node.start_hint}") from None
        raise
    async with connection as cri:
        yield NodeImages(node, cri, PinRecord(node.root_dir))


def choose_images(images: Sequence[pb.Image], texts: Iterable[str]) -> list[pb.Image]:
    """Return the images that the texts select, each once. Raises ImageSelectionError."""
    found: dict[str, pb.Image] = {}
    for text in texts:
        image = choose_image(images, text)
        found[image.id] = image
    return list(found.values())


def choose_image(images: Sequence[pb.Image], text: str) -> pb.Image:
    """Return the image with this name, or whose id or digest begins so. Raises ImageSelectionError."""
    try:
        names = {text, *parse_image_name(text).listed_names}
    except InvalidImageName:
        names = {text}
    for image in images:
        if image.id == text or not names.isdisjoint((*image.repo_tags, *image.repo_digests)):
            return image
    beginning = text.removeprefix("sha256:")
    matches = [
        image
        for image in images
        if len(beginning) >= MIN_ID_CHARACTERS and image.id.removeprefix("sha256:").startswith(beginning)
    ]
    if len({image.id for image in matches}) > 1:
        _fail(f"{quoted(text)} may be any of these images, give more of the id:", matches)
    if not matches:
        raise ImageSelectionError(f"there is no image {quoted(text)}: see `pykubelet images ls`")
    return matches[0]


def image_names(image: pb.Image) -> list[str]:
    """Return the names of an image, tags first; its id if it has none."""
    return [*image.repo_tags, *image.repo_digests] or [image.id]


def title(image: pb.Image) -> str:
    """Return the name by which users know an image, safe for terminals."""
    return escape_unprintable(image_names(image)[0], lines=False)


async def users_of(cri: RuntimeConnection, images: Sequence[pb.Image]) -> dict[str, set[str]]:
    """Return the pods (as NAMESPACE/NAME) that use each image, by its id. Raises CriError."""
    containers = await cri.runtime.list_containers()
    mounts: dict[str, set[str]] = {}
    for container in containers:
        try:
            status = (await cri.runtime.container_status(container.id)).status
        except NotFound:
            continue
        mounts[container.id] = {mount.image.image for mount in status.mounts if mount.image.image}
    users: dict[str, set[str]] = {image.id: set() for image in images}
    for container in containers:
        used = find_images_in_use(images, [container], mounts.get(container.id, set()), by_handler=False)
        labels = container.labels
        pod = f"{labels['io.kubernetes.pod.namespace']}/{labels['io.kubernetes.pod.name']}"
        for image in images:
            if image_key(image, by_handler=False) in used:
                users[image.id].add(pod if pod != "/" else container.id)
    return users


def _fail(heading: str, images: Sequence[pb.Image]) -> NoReturn:
    lines = [f"  {image.id} {title(image)}" for image in images[:_MAX_CANDIDATES]]
    raise ImageSelectionError("\n".join([heading, *lines]))
