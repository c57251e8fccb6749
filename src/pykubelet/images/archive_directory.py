"""Image archives in `images/` of the manifest directory: imported and pinned, before pods use them.

`ArchiveDirectory` imports an archive when the kubelet starts and when the file appears or changes. Its
record, in the kubelet's root directory, has the size, time and digest of each imported file and its images,
so that no archive is imported twice; an archive whose images were removed is imported again at the next
start. The pins end when the file is removed. A file that cannot be imported is one warning; it is tried
again when it changes, and after other failures than of the file itself (a full disk) also later.

`ArchivedImages` is the runtime's image service for the image manager: while archives are being imported, an
image that is not present is looked for again when they are done, for at most `WAIT_SECONDS`.

A kubelet that is killed during an import imports the archive again.
"""

from __future__ import annotations

import asyncio
import os
import stat
from collections.abc import Iterable, Set
from dataclasses import dataclass
from pathlib import Path

import msgspec

from pykubelet.cri import runtime_pb2 as pb
from pykubelet.images.archive import ArchiveError
from pykubelet.images.importer import ArchiveImporter, ImportFailed, open_archive
from pykubelet.images.pins import PinError
from pykubelet.images.puller import ImageService
from pykubelet.logs import get_logger
from pykubelet.podconfig.file_source import PathWatch, directories_to_watch
from pykubelet.transport.errors import CriError
from pykubelet.util.backoff import KeyedBackoff
from pykubelet.util.files import write_atomically
from pykubelet.util.tasks import finish_in_thread

log = get_logger(__name__)
RECORD_NAME = "image_archives.json"
MAX_FILES = 500
SCAN_SECONDS = 60.0
"""Seconds between scans without an event."""
UNSETTLED_SECONDS = 1.0
"""The same while a file is being written."""
WAIT_SECONDS = 120.0
"""Seconds that a pod waits for archives whose import takes long."""
IMPORT_SECONDS = 1800.0
"""Seconds after which an import is given up."""
_RETRY_SECONDS = (30.0, 600.0)
_MAX_RECORD_BYTES = 4 * 1024 * 1024


class _Entry(msgspec.Struct, frozen=True, rename="camel"):
    """An imported archive."""

    stamp: str
    digest: str
    images: list[str]


@dataclass(frozen=True, slots=True)
class _Listing:
    stamps: dict[str, str]
    """Fingerprint of each file by name."""
    unsettled: bool
    """Whether a file is being written."""


class ArchiveDirectory:
    """The archives of one node; `run` imports them."""

    def __init__(self, directory: Path, root_dir: Path, importer: ArchiveImporter) -> None:
        self.directory = directory
        self._record_path = root_dir / RECORD_NAME
        self._importer = importer
        self._entries: dict[str, _Entry] = {}
        self._verified: set[str] = set()
        """Files whose images were present since the kubelet started."""
        self._rejected: dict[str, str] = {}
        """Fingerprints of files that cannot be imported as they are."""
        self._back_off = KeyedBackoff(*_RETRY_SECONDS)
        self._failed_at: dict[str, float] = {}
        self._done = asyncio.Event()

    async def run(self) -> None:
        """Import archives until cancelled."""
        self._entries = await asyncio.to_thread(self._read_record)
        with PathWatch() as watch:
            while True:
                watch.arm(await asyncio.to_thread(directories_to_watch, self.directory))
                try:
                    listing = await asyncio.to_thread(self._list, watch.being_written())
                except OSError as err:
                    log.warning("Failed to list image archives", path=self.directory, err=err)
                    listing = None
                if listing is not None:
                    await self._scan(listing)
                self._done.set()
                unsettled = listing is not None and listing.unsettled
                await watch.wait(UNSETTLED_SECONDS if unsettled else SCAN_SECONDS)

    async def wait_imported(self) -> bool:
        """Wait until no import is in progress; return whether one was."""
        if self._done.is_set():
            return False
        try:
            async with asyncio.timeout(WAIT_SECONDS):
                await self._done.wait()
        except TimeoutError:
            log.info("Image archives are still being imported, not waiting any longer", path=self.directory)
        return True

    async def _scan(self, listing: _Listing) -> None:
        for name in self._entries.keys() - listing.stamps.keys():
            await self._forget(name)
        for name in (self._rejected.keys() | self._failed_at.keys()) - listing.stamps.keys():
            self._rejected.pop(name, None)
            self._failed_at.pop(name, None)
        for name, stamp in listing.stamps.items():
            if not self._is_due(name, stamp):
                continue
            self._done.clear()
            try:
                async with asyncio.timeout(IMPORT_SECONDS):
                    await self._import(name, stamp)
            except ArchiveError as err:
                self._rejected[name] = stamp
                log.warning("Ignored image archive", path=self.directory / name, problem=str(err))
            except (ImportFailed, PinError, CriError, OSError, TimeoutError) as err:
                now = asyncio.get_running_loop().time()
                self._back_off.attempt(name, now, now)
                self._failed_at[name] = now
                problem = str(err) or f"it took more than {IMPORT_SECONDS:g} s"
                log.warning("Failed to import image archive", path=self.directory / name, problem=problem)
            else:
                self._verified.add(name)
                self._failed_at.pop(name, None)
                self._back_off.forget(name)

    def _is_due(self, name: str, stamp: str) -> bool:
        if self._rejected.get(name) == stamp:
            return False
        failed_at = self._failed_at.get(name)
        if failed_at is not None:
            now = asyncio.get_running_loop().time()
            return self._back_off.remaining(name, failed_at, now) <= 0
        entry = self._entries.get(name)
        return entry is None or entry.stamp != stamp or name not in self._verified

    async def _import(self, name: str, stamp: str) -> None:
        """Import an archive unless its images are present."""
        entry = self._entries.get(name)
        if entry is not None and entry.stamp == stamp and await self._importer.are_present(entry.images):
            return
        with open_archive(self.directory / name) as file:
            contents = await self._importer.check(file)
            is_known = entry is not None and entry.digest == contents.digest
            if not is_known or not await self._importer.are_present(contents.names):
                await self._importer.load(file, contents)
                log.info("Imported image archive", path=self.directory / name, images=list(contents.names))
        # First: after a failure the record still has what is pinned, and the next attempt unpins it.
        await self._unpin(name, set(entry.images if entry is not None else ()) - set(contents.names))
        self._entries[name] = _Entry(stamp, contents.digest, list(contents.names))
        await self._write_record()

    async def _forget(self, name: str) -> None:
        """Unpin the images of a file that was removed; after a failure the next scan retries it."""
        self._verified.discard(name)
        try:
            await self._unpin(name, self._entries[name].images)
            del self._entries[name]
            await self._write_record()
        except (PinError, CriError, OSError) as err:
            log.warning("Failed to unpin the images of a removed archive", path=name, err=err)
        else:
            log.info("Image archive was removed, its images are not pinned any more", path=name)

    async def _unpin(self, name: str, images: Iterable[str]) -> None:
        """Unpin images of a file that no other file has."""
        others = (entry for other, entry in self._entries.items() if other != name)
        used = {image for entry in others for image in entry.images}
        await self._importer.unpin(set(images) - used)

    def _list(self, being_written: Set[Path]) -> _Listing:
        """Return the files of the directory, which may not exist. Raises OSError."""
        stamps, unsettled = {}, False
        try:
            names = sorted(entry.name for entry in os.scandir(self.directory))
        except (FileNotFoundError, NotADirectoryError):
            return _Listing({}, unsettled=False)
        visible = [name for name in names if not name.startswith(".")]
        if len(visible) > MAX_FILES:
            log.warning("Directory has too many image archives", path=self.directory, limit=MAX_FILES)
        for name in visible[:MAX_FILES]:
            path = self.directory / name
            try:
                found = path.stat()
            except OSError:
                continue
            if not stat.S_ISREG(found.st_mode):
                continue
            if path in being_written or found.st_size == 0:
                # An empty file that no process writes to may stay for ever; its first byte is an event.
                unsettled = unsettled or path in being_written
                if (entry := self._entries.get(name)) is not None:
                    stamps[name] = entry.stamp
                continue
            stamps[name] = f"{found.st_size} {found.st_mtime_ns} {found.st_ino}"
        return _Listing(stamps, unsettled)

    def _read_record(self) -> dict[str, _Entry]:
        try:
            with self._record_path.open("rb") as file:
                return msgspec.json.decode(file.read(_MAX_RECORD_BYTES), type=dict[str, _Entry])
        except FileNotFoundError:
            return {}
        except (OSError, ValueError, RecursionError) as err:
            # Every archive is checked again, and imported if its images are missing.
            log.warning("Ignored invalid record of image archives", path=self._record_path, err=err)
            return {}

    async def _write_record(self) -> None:
        content = msgspec.json.format(msgspec.json.encode(self._entries), indent=2)
        await finish_in_thread(lambda: write_atomically(self._record_path, content))


class ArchivedImages:
    """The runtime's image service, which waits for archives before it reports an image as missing."""

    def __init__(self, client: ImageService, archives: ArchiveDirectory) -> None:
        self._client = client
        self._archives = archives

    async def list_images(self) -> list[pb.Image]:
        """List all images."""
        return await self._client.list_images()

    async def image_status(self, image: pb.ImageSpec, *, verbose: bool = False) -> pb.ImageStatusResponse:
        """Return the status of an image."""
        response = await self._client.image_status(image, verbose=verbose)
        if not response.HasField("image") and await self._archives.wait_imported():
            response = await self._client.image_status(image, verbose=verbose)
        return response

    async def pull_image(
        self,
        image: pb.ImageSpec,
        auth: pb.AuthConfig | None = None,
        sandbox_config: pb.PodSandboxConfig | None = None,
    ) -> str:
        """Pull an image."""
        return await self._client.pull_image(image, auth, sandbox_config)
