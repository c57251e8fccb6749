"""`pykubelet images ls`: the images of a node.

The runtime reports images, sizes and containers; the kubelet's record and the runtime report pins. When an
image was last used only the running kubelet knows, and only since its start.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime

import msgspec

from pykubelet.cli.client import NodeError, run_command
from pykubelet.cli.images.access import (
    EXPECTED,
    ImageSelectionError,
    NodeImages,
    choose_images,
    image_names,
    node_images,
    run_on_images,
    users_of,
)
from pykubelet.cli.node_access import Node, select_node
from pykubelet.cli.options import NodeSelection
from pykubelet.cli.output import serialized
from pykubelet.cli.pods.usage import format_size
from pykubelet.cli.printers import escape_unprintable, format_age, format_columns
from pykubelet.cli.watch import Watch, WatchedRow, watch_table
from pykubelet.cri.containerd_store import ContainerdStore
from pykubelet.standalone.seed_images import BUSYBOX_IMAGE, PAUSE_IMAGE
from pykubelet.transport.errors import CriError

PROGRAM = "pykubelet images ls"
_UNKNOWN = "<unknown>"
_SHORT_ID = 12
WATCH_SECONDS = 2.0
"""Seconds between two lists while watching: each requests the status of every container."""
_SEEDS = frozenset((PAUSE_IMAGE, BUSYBOX_IMAGE))
_HEADINGS = ("IMAGE", "ID", "SIZE", "PINNED", "PODS", "LAST USED", "AGE")


class ListedImage(msgspec.Struct, rename="camel"):
    """An image in the output of `-o json`; times are seconds since the epoch."""

    id: str
    names: list[str]
    digests: list[str]
    size: int
    pinned: bool
    pods: list[str]
    """Pods that use it, as NAMESPACE/NAME."""
    last_used: float | None = None
    """Time of the last use that the running kubelet has observed."""
    created: float | None = None
    """Time when it came to the node, if the runtime reports it."""


def run_list(selection: NodeSelection, names: Sequence[str], output: str, *, watch: bool = False) -> int:
    """Print the images, with `watch` until interrupted; return the exit code."""
    if watch:
        return run_command(
            PROGRAM, lambda: _watch(selection, names, wide=output == "wide"), *EXPECTED, ImageSelectionError
        )

    async def work(images: NodeImages) -> int:
        found = await _chosen(images, names)
        if not found and output in ("table", "wide"):
            print("The node has no images", file=sys.stderr)
            return 0
        text = render(found, output, datetime.now(UTC))
        print(text, end="" if not text or text.endswith("\n") else "\n")
        return 0

    return run_on_images(PROGRAM, selection, work)


def _watch(selection: NodeSelection, names: Sequence[str], *, wide: bool) -> int:
    node = select_node(selection)

    async def listed() -> list[ListedImage]:
        async with node_images(node) as images:
            return await _chosen(images, names)

    def read() -> list[WatchedRow]:
        now = datetime.now(UTC)
        return [
            _watched(tuple(row), image, _heading(wide=wide))
            for image in asyncio.run(listed())
            for row in _rows(image, now, wide=wide)
        ]

    errors = (*EXPECTED, NodeError, ImageSelectionError)
    column = _HEADINGS.index("LAST USED")
    watch_table(Watch(PROGRAM, _heading(wide=wide), read, errors, column, WATCH_SECONDS))
    return 0


def _watched(cells: tuple[str, ...], image: ListedImage, heading: Sequence[str]) -> WatchedRow:
    ages = {heading.index("AGE"), heading.index("LAST USED")}
    state = (cell for column, cell in enumerate(cells) if column not in ages)
    return WatchedRow((image.id, cells[0]), cells, (*state, str(bool(image.pods))))


async def _chosen(images: NodeImages, names: Sequence[str]) -> list[ListedImage]:
    """Return all images, or those with these names. Raises CriError, PinError, ImageSelectionError."""
    found = await list_images(images)
    if not names:
        return found
    kept = {image.id for image in choose_images(await images.cri.images.list_images(), names)}
    return [image for image in found if image.id in kept]


async def list_images(images: NodeImages) -> list[ListedImage]:
    """Return the images by name. Raises CriError and PinError."""
    listed = await images.cri.images.list_images()
    users = await users_of(images.cri, listed)
    pins = await asyncio.to_thread(images.pins.names) | _SEEDS
    last_used = await asyncio.to_thread(_last_used, images.node)
    created = await _created(images)
    now = datetime.now(UTC).timestamp()
    found = {}
    for image in listed:
        names = image_names(image)
        found[image.id] = ListedImage(
            id=image.id,
            names=[name for name in names if name not in image.repo_digests],
            digests=list(image.repo_digests),
            size=image.size,
            pinned=image.pinned or image.id in pins or not pins.isdisjoint(names),
            pods=sorted(users[image.id]),
            last_used=now if users[image.id] else last_used.get(image.id),
            created=min((created[name] for name in (*names, image.id) if name in created), default=None),
        )
    return sorted(found.values(), key=lambda item: (item.names or item.digests or [item.id])[0])


def _last_used(node: Node) -> Mapping[str, float | None]:
    """Return the last uses by image id; empty when no kubelet runs."""
    try:
        return {usage.id: usage.last_used for usage in node.client.image_usages().items}
    except NodeError:
        return {}


async def _created(images: NodeImages) -> Mapping[str, float]:
    """Return the times when images came to the node by name; empty for other runtimes."""
    if images.cri.version.runtime_name != "containerd":
        return {}
    try:
        found = await ContainerdStore(images.cri.image_channel).list_images()
    except CriError:
        return {}
    return {image.name: image.created_at.seconds for image in found}


def render(images: Sequence[ListedImage], output: str, now: datetime) -> str:
    """Return the images in an output format."""
    if output in ("json", "yaml"):
        return serialized({"items": msgspec.to_builtins(images)}, output)
    if output == "name":
        names = (name for image in images for name in image.names or image.digests)
        return "\n".join(escape_unprintable(name, lines=False) for name in names)
    wide = output == "wide"
    rows = [row for image in images for row in _rows(image, now, wide=wide)]
    return "\n".join(format_columns([_heading(wide=wide), *rows]))


def _heading(*, wide: bool) -> tuple[str, ...]:
    return (*_HEADINGS, "DIGEST") if wide else _HEADINGS


def _rows(image: ListedImage, now: datetime, *, wide: bool) -> list[list[str]]:
    bare = image.id.removeprefix("sha256:")
    names = image.names or [name if wide else _shortened(name) for name in image.digests[:1]] or ["<none>"]
    digest = next((name.partition("@")[2] for name in image.digests), "<none>")
    return [
        [
            name,
            bare if wide else bare[:_SHORT_ID],
            format_size(image.size),
            "yes" if image.pinned else "no",
            str(len(image.pods)),
            _time_text(image.last_used, now, in_use=bool(image.pods)),
            _age(image.created, now),
            *([digest] if wide else []),
        ]
        for name in names
    ]


def _shortened(name: str) -> str:
    """Shorten the digest in a name."""
    repository, _, digest = name.partition("@sha256:")
    return f"{repository}@sha256:{digest[:_SHORT_ID]}" if digest else name


def _time_text(moment: float | None, now: datetime, *, in_use: bool) -> str:
    if in_use:
        return "in use"
    return _UNKNOWN if moment is None else f"{_age(moment, now)} ago"


def _age(moment: float | None, now: datetime) -> str:
    return format_age(datetime.fromtimestamp(moment, UTC) if moment else None, now)
