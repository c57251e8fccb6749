"""`pykubelet images rm`, `prune`, `pin` and `unpin`.

`rm` and the pins work on the runtime and the record of pins, also while the kubelet is stopped. Only the
running kubelet can prune: it knows which images are about to be used, and since when it has seen each.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Sequence

from pykubelet.cli.client import run_command
from pykubelet.cli.images.access import (
    NodeImages,
    choose_images,
    image_names,
    run_on_images,
    title,
    users_of,
)
from pykubelet.cli.node_access import select_node
from pykubelet.cli.options import NodeSelection
from pykubelet.cli.printers import escape_unprintable
from pykubelet.cri import runtime_pb2 as pb
from pykubelet.images.importer import set_pinned
from pykubelet.server.images import PruneReport
from pykubelet.standalone.seed_images import BUSYBOX_IMAGE, PAUSE_IMAGE
from pykubelet.transport.errors import CriError
from pykubelet.util.text import format_size

REMOVE, PRUNE, PIN, UNPIN = (f"pykubelet images {name}" for name in ("rm", "prune", "pin", "unpin"))
_MAX_NAMED_PODS = 3


def run_remove(selection: NodeSelection, names: Sequence[str], *, force: bool) -> int:
    """Remove images; return the exit code, 1 if one was not removed."""

    async def work(images: NodeImages) -> int:
        listed = await images.cri.images.list_images()
        chosen = choose_images(listed, names)
        users = await users_of(images.cri, chosen)
        pins = await asyncio.to_thread(images.pins.names)
        code = 0
        for image in chosen:
            problem = "" if force else _why_kept(image, users[image.id], pins)
            if not problem:
                problem = await _remove(images, image)
            if problem:
                code = 1
                print(f"{REMOVE}: {title(image)} was not removed: {problem}", file=sys.stderr)
        return code

    return run_on_images(REMOVE, selection, work)


def _why_kept(image: pb.Image, users: set[str], pins: frozenset[str]) -> str:
    """Return the reason why an image is not removed without --force, or ""."""
    if users:
        shown = ", ".join(sorted(users)[:_MAX_NAMED_PODS])
        more = f" and {len(users) - _MAX_NAMED_PODS} more" if len(users) > _MAX_NAMED_PODS else ""
        return f"used by {shown}{more}; --force removes its names, and containers keep running"
    names = {image.id, *image_names(image)}
    if names & {PAUSE_IMAGE, BUSYBOX_IMAGE}:
        return "this node needs it to start pods; --force removes it until the next start"
    if image.pinned or names & pins:
        return "it is pinned; run `pykubelet images unpin` first, or give --force"
    return ""


async def _remove(images: NodeImages, image: pb.Image) -> str:
    """Remove an image and its pins; return the problem, or ""."""
    try:
        await images.cri.images.remove_image(pb.ImageSpec(image=image.id))
    except CriError as err:
        return err.rpc_text
    await asyncio.to_thread(images.pins.remove, {image.id, *image_names(image)})
    for name in image_names(image):
        print(f"Removed {escape_unprintable(name, lines=False)}")
    return ""


def run_prune(selection: NodeSelection, *, dry_run: bool) -> int:
    """Remove unused images; return the exit code, 1 if one could not be removed."""

    def work() -> int:
        report = select_node(selection).client.prune_images(dry_run=dry_run)
        print("\n".join(prune_lines(report, dry_run=dry_run)))
        for failure in report.failures:
            print(f"{PRUNE}: {escape_unprintable(failure, lines=False)}", file=sys.stderr)
        return 1 if report.failures else 0

    return run_command(PRUNE, work)


def prune_lines(report: PruneReport, *, dry_run: bool) -> list[str]:
    """Return the report as lines: each image, then the sum."""
    verb = "Would remove" if dry_run else "Removed"
    lines = [
        f"{verb} {escape_unprintable(name, lines=False)} ({format_size(image.size)})"
        for image in report.removed
        for name in (image.names or [image.id])[:1]
    ]
    count = f"{len(report.removed)} image{'' if len(report.removed) == 1 else 's'}"
    freed = f"{'would free' if dry_run else 'freed'} {format_size(report.freed_bytes)}"
    lines.append(f"{count}, {freed}" if report.removed else "No unused images to remove")
    if report.young:
        lines.append(
            f"{report.young} unused image{'' if report.young == 1 else 's'} kept: seen for less than "
            f"{report.min_age} (imageMinimumGCAge)"
        )
    return lines


def run_pin(selection: NodeSelection, names: Sequence[str], *, pinned: bool) -> int:
    """Pin or unpin images; return the exit code."""

    async def work(images: NodeImages) -> int:
        for image in choose_images(await images.cri.images.list_images(), names):
            known = {image.id, *image_names(image)}
            chosen = set(image.repo_tags or image_names(image)) if pinned else known
            before = image.pinned or not known.isdisjoint(await asyncio.to_thread(images.pins.names))
            await set_pinned(images.cri, images.pins, chosen, pinned=pinned)
            was = " already" if pinned and before else "" if pinned or before else " not"
            print(f"{title(image)}{' was' if was else ''}{was} {'pinned' if pinned or was else 'unpinned'}")
        return 0

    return run_on_images(PIN if pinned else UNPIN, selection, work)
