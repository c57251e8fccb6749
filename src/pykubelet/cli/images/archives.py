"""`pykubelet images load` and `save`.

`load` reads standard input into a file without a name first, because an archive is checked as a whole
before its import; nothing is left of it after an interruption. `save` writes beside the target and renames
at the end.
"""

from __future__ import annotations

import asyncio
import os
import sys
import tempfile
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from functools import partial
from pathlib import Path
from typing import BinaryIO

from pykubelet.cli.images.access import NodeImages, choose_images, image_names, run_on_images
from pykubelet.cli.images.progress import display
from pykubelet.cli.options import NodeSelection
from pykubelet.cli.pods.exec import read_input
from pykubelet.cli.printers import escape_unprintable
from pykubelet.images.archive import ArchiveError
from pykubelet.images.image_reference import parse_image_name
from pykubelet.images.importer import ArchiveImporter, ImportFailed, open_archive
from pykubelet.util.tasks import finish_in_thread
from pykubelet.util.text import format_size

LOAD, SAVE = "pykubelet images load", "pykubelet images save"
STANDARD = "-"
"""Name of standard input or output."""
SPOOL_SHARE = 2
"""Part of the free space that standard input may need: a half."""


def run_load(selection: NodeSelection, file: str, base_name: str) -> int:
    """Load and pin the images of an archive; return the exit code."""

    async def work(images: NodeImages) -> int:
        importer = ArchiveImporter(images.cri, images.pins)
        importer.require_containerd()
        repository = _repository(base_name)
        title = "standard input" if file == STANDARD else file
        try:
            async with _opened(file, images.node.root_dir) as archive:
                with display() as shown:
                    shown.update(f"Checking {title}", None, None)
                    contents = await importer.check(archive, base_name=repository)
                    loaded = await importer.load(
                        archive, contents, base_name=repository, on_progress=shown.update
                    )
        except ArchiveError as err:
            raise ImportFailed(escape_unprintable(f"{title} {err}", lines=False)) from None
        except asyncio.CancelledError:
            print(f"{LOAD}: stopped; load it again to complete it", file=sys.stderr)
            raise
        for image in loaded:
            print(f"Loaded {image.name} ({image.id}), pinned")
        return 0

    return run_on_images(LOAD, selection, work)


def _repository(base_name: str) -> str:
    """Return a repository with its registry, or "". Raises InvalidImageName and ImportFailed."""
    if not base_name:
        return ""
    name = parse_image_name(base_name)
    if name.digest or base_name.endswith(f":{name.tag}"):
        raise ImportFailed("--name is a repository, without a tag: the tag comes from the archive")
    return name.repository


@asynccontextmanager
async def _opened(file: str, spool_dir: Path) -> AsyncIterator[BinaryIO]:
    """Open the archive; standard input is copied to a file without a name. Raises ImportFailed."""
    if file != STANDARD:
        with open_archive(Path(file)) as archive:
            yield archive
        return
    if sys.stdin.isatty():
        raise ImportFailed("standard input is a terminal: give a file, or pipe an archive")
    with tempfile.TemporaryFile(dir=spool_dir if spool_dir.is_dir() else None) as spool:
        try:
            await _spool_input(spool)
        except OSError as err:
            raise ImportFailed(
                f"standard input cannot be stored in {spool_dir}: {err.strerror}: give a file"
            ) from err
        yield spool


async def _spool_input(spool: BinaryIO) -> None:
    """Copy standard input to a file, at most half of what is free there. Raises ImportFailed and OSError."""
    disk = os.fstatvfs(spool.fileno())
    left = limit = disk.f_bavail * disk.f_frsize // SPOOL_SHARE
    async for data in read_input(sys.stdin.fileno()):
        left -= len(data)
        if left < 0:
            raise ImportFailed(
                f"standard input has more than {format_size(limit)}, half of the free space on the disk of "
                "the kubelet's root directory: give a file"
            )
        await finish_in_thread(partial(spool.write, data))
    await finish_in_thread(spool.flush)


def run_save(selection: NodeSelection, names: Sequence[str], output: str, *, force: bool) -> int:
    """Write images to an archive; return the exit code."""

    async def work(images: NodeImages) -> int:
        importer = ArchiveImporter(images.cri, images.pins)
        importer.require_containerd()
        found = choose_images(await images.cri.images.list_images(), names)
        chosen = [name for image in found for name in image.repo_tags or image_names(image)[:1]]
        if output == STANDARD:
            if sys.stdout.isatty():
                raise ImportFailed(
                    "standard output is a terminal: give a file with -o, or redirect the output"
                )
            await importer.save(chosen, "/proc/self/fd/1", inherit_output=True)
            return 0
        target = Path(output)
        if target.exists() and not force:
            raise ImportFailed(f"{target} exists: give --force to replace it")
        with _replacing(target) as temporary:
            await importer.save(chosen, str(temporary))
            size = temporary.stat().st_size
        for name in chosen:
            print(f"Saved {escape_unprintable(name, lines=False)}")
        print(f"Wrote {target} ({format_size(size)})")
        return 0

    return run_on_images(SAVE, selection, work)


@contextmanager
def _replacing(target: Path) -> Iterator[Path]:
    """Yield a new file that replaces the target at the end; after a failure it is removed."""
    try:
        descriptor, name = tempfile.mkstemp(prefix=f".{target.name}.", dir=target.parent)
    except OSError as err:
        raise ImportFailed(f"cannot write to {target.parent}: {err.strerror}") from err
    temporary = Path(name)
    try:
        yield temporary
        os.fchmod(descriptor, 0o666 & ~_umask())
        os.fsync(descriptor)
        temporary.replace(target)
    except OSError as err:
        raise ImportFailed(f"cannot write {target}: {err.strerror}") from err
    finally:
        os.close(descriptor)
        temporary.unlink(missing_ok=True)


def _umask() -> int:
    found = os.umask(0o077)
    os.umask(found)
    return found
