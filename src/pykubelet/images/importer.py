"""Import and export of image archives through containerd's `ctr`, and the pins of imported images.

CRI can neither import nor export. `ctr` belongs to containerd and is installed with it; a node with another
runtime gets an `ImportFailed` that says so.

`ArchiveImporter.load` imports an archive that was checked, waits until CRI lists the images, and pins them.
After a failure or a cancellation `ctr` has ended, and containerd removes what was received. A pin that cannot
be recorded is an error: the images stay, and loading them again pins them.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import stat
import threading
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from pykubelet.cri import runtime_pb2 as pb
from pykubelet.cri.connect import RuntimeConnection
from pykubelet.cri.containerd import CRI_NAMESPACE
from pykubelet.cri.containerd_store import ContainerdStore
from pykubelet.images.archive import ArchiveContents, ArchiveError, check_archive, open_payload
from pykubelet.images.pins import PinRecord
from pykubelet.images.tar_reader import CHUNK_BYTES, TarError
from pykubelet.linux.processes import environment, kill_and_wait, search_path
from pykubelet.util.tasks import finish_in_thread, run_or_undo

MAX_ARCHIVE_BYTES = 256 * 1024**3
"""Bytes of the largest archive, and of its extracted layers, whatever is free."""
LIST_SECONDS = 10.0
"""Seconds until an imported image must be listed by CRI."""
_POLL_SECONDS = 0.05
_GRACE_SECONDS = 2.0
_MAX_STDERR_BYTES = 64 * 1024
_SNAPSHOTTER = "io.containerd.snapshotter.v1."


class ImportFailed(Exception):
    """Raised when an archive cannot be imported or written; one line with the cause and a remedy."""


class _Cancelled(Exception):
    """Ends a check in its thread after its caller was cancelled."""


@dataclass(frozen=True, slots=True)
class LoadedImage:
    """An image after its import."""

    name: str
    id: str


Progress = Callable[[str, int, int], None]
"""Called with a step, and the bytes done and in total."""


def _ignore(step: str, done: int, total: int) -> None:
    pass


class ArchiveImporter:
    """Importer of archives into one node's containerd."""

    def __init__(self, cri: RuntimeConnection, pins: PinRecord) -> None:
        self._cri = cri
        self._pins = pins

    def require_containerd(self) -> str:
        """Return the path of `ctr`. Raises ImportFailed when it is missing or the runtime is another one."""
        version = self._cri.version
        if version.runtime_name != "containerd":
            raise ImportFailed(
                f"{version.runtime_name} cannot import or export archives through its API: use its own tool, "
                "such as `skopeo copy` or `podman load`"
            )
        # The one of a containerd that was added to PATH comes first.
        found = shutil.which("ctr", path=search_path())
        if found is None:
            raise ImportFailed("`ctr` is not in PATH: install it, it is part of containerd")
        return found

    async def check(self, file: BinaryIO, *, base_name: str = "") -> ArchiveContents:
        """Check an archive. Raises ArchiveError, ImportFailed and CriError."""
        limit = await self._available()
        cancelled = threading.Event()

        def check_cancelled() -> None:
            if cancelled.is_set():
                raise _Cancelled

        task = asyncio.ensure_future(
            finish_in_thread(lambda: check_archive(file, limit, check_cancelled, base_name=base_name))
        )
        try:
            return await asyncio.shield(task)
        except asyncio.CancelledError:
            cancelled.set()
            await asyncio.wait([task])
            if not task.cancelled():
                task.exception()  # mark as retrieved
            raise
        except OSError as err:
            raise ImportFailed(f"the archive cannot be read: {err.strerror or err}") from err

    async def load(
        self,
        file: BinaryIO,
        contents: ArchiveContents,
        *,
        base_name: str = "",
        on_progress: Progress = _ignore,
    ) -> list[LoadedImage]:
        """Import and pin the images of a checked archive. Raises ImportFailed, PinError and CriError."""
        await self._import(file, contents, base_name, on_progress)
        loaded = [await self._wait_listed(name) for name in contents.names]
        # Afterwards: on a full disk the pins of a failed import could not be removed again. Until then the
        # minimum age protects the images from garbage collection.
        await set_pinned(self._cri, self._pins, contents.names, pinned=True)
        return loaded

    async def are_present(self, names: Iterable[str]) -> bool:
        """Return whether the runtime has all these images. Raises CriError."""
        for name in names:
            response = await self._cri.images.image_status(pb.ImageSpec(image=name))
            if not response.HasField("image"):
                return False
        return True

    async def unpin(self, names: Iterable[str]) -> None:
        """Remove the pins of images. Raises PinError and CriError."""
        await set_pinned(self._cri, self._pins, names, pinned=False)

    async def save(self, names: Sequence[str], path: str, *, inherit_output: bool = False) -> None:
        """Write images of this node's platform to an OCI archive. Raises ImportFailed.

        With `inherit_output` the path is one of standard output, which ctr shares with this process.
        """
        ctr = self.require_containerd()
        stdout = None if inherit_output else asyncio.subprocess.DEVNULL
        arguments = ("images", "export", path, *names)
        async with self._running(ctr, *arguments, stdin=asyncio.subprocess.DEVNULL, stdout=stdout) as run:
            await run.finish("the images cannot be written")

    async def snapshotter(self) -> str:
        """Return the snapshotter of the CRI images, or "" for ctr's default. Raises CriError."""
        path = await self._mount_point()
        return path.rpartition(_SNAPSHOTTER)[2].partition("/")[0] if _SNAPSHOTTER in path else ""

    async def _mount_point(self) -> str:
        response = await self._cri.images.image_fs_info()
        return next((found.fs_id.mountpoint for found in response.image_filesystems), "")

    async def _available(self) -> int:
        """Return the bytes that an archive may need on the disk of the images. Raises CriError."""
        path = await self._mount_point()
        try:
            found = await asyncio.to_thread(os.statvfs, path)
        except OSError:
            return MAX_ARCHIVE_BYTES
        return min(found.f_bavail * found.f_frsize, MAX_ARCHIVE_BYTES)

    async def _import(
        self, file: BinaryIO, contents: ArchiveContents, base_name: str, on_progress: Progress
    ) -> None:
        ctr, snapshotter = self.require_containerd(), await self.snapshotter()
        options = [*([f"--snapshotter={snapshotter}"] if snapshotter else [])]
        options += [f"--base-name={base_name}"] if base_name else []
        total = os.fstat(file.fileno()).st_size
        payload = open_payload(file, contents, MAX_ARCHIVE_BYTES)
        async with self._running(
            ctr, "images", "import", *options, "-", stdin=asyncio.subprocess.PIPE
        ) as run:
            try:
                while chunk := await finish_in_thread(lambda: payload.read(CHUNK_BYTES)):
                    if not await run.write(chunk):
                        break
                    on_progress("Importing", file.tell(), total)
            except (OSError, TarError, ArchiveError) as err:
                raise ImportFailed(f"the archive cannot be read: {err}") from err
            on_progress("Unpacking", total, total)
            await run.finish("containerd cannot import it")

    @asynccontextmanager
    async def _running(
        self, ctr: str, *arguments: str, stdin: int, stdout: int | None = asyncio.subprocess.DEVNULL
    ) -> AsyncIterator[_Ctr]:
        """Run ctr within the context; it is killed if it still runs at the end."""
        address = f"--address={self._cri.image_channel.endpoint.path}"
        try:
            process = await run_or_undo(
                asyncio.create_subprocess_exec(
                    *(ctr, address, f"--namespace={CRI_NAMESPACE}", *arguments),
                    stdin=stdin,
                    stdout=stdout,
                    stderr=asyncio.subprocess.PIPE,
                    env=environment(),
                    start_new_session=True,
                ),
                kill_and_wait,
            )
        except OSError as err:
            raise ImportFailed(f"{ctr} cannot be started: {err.strerror or err}") from err
        run = _Ctr(process)
        try:
            yield run
        finally:
            await run.end()

    async def _wait_listed(self, name: str) -> LoadedImage:
        """Wait until CRI lists an image, which its plugin learns from an internal event."""
        deadline = asyncio.get_running_loop().time() + LIST_SECONDS
        while True:
            response = await self._cri.images.image_status(pb.ImageSpec(image=name))
            if response.HasField("image"):
                return LoadedImage(name, response.image.id)
            if asyncio.get_running_loop().time() > deadline:
                raise ImportFailed(
                    f"image {name} was imported, but the runtime does not list it: "
                    "is it for another platform? see containerd's log"
                )
            await asyncio.sleep(_POLL_SECONDS)


class _Ctr:
    """A running ctr; its error output is bounded."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process
        self._errors = asyncio.ensure_future(self._read_errors())

    async def write(self, chunk: bytes) -> bool:
        """Write to its input; return False when it has closed it."""
        stdin = self._process.stdin
        assert stdin is not None
        try:
            stdin.write(chunk)
            await stdin.drain()
        except (BrokenPipeError, ConnectionResetError):
            return False
        return True

    async def finish(self, problem: str) -> None:
        """Wait for its end. Raises ImportFailed with `problem` and its error output."""
        if self._process.stdin is not None:
            self._process.stdin.close()
        errors = await self._errors
        if code := await self._process.wait():
            reason = " ".join(errors.decode(errors="replace").split()).removeprefix("ctr: ")
            raise ImportFailed(f"{problem}: {reason or f'ctr ended with status {code}'}")

    async def end(self) -> None:
        """End it, if it still runs: without input it releases what it received, before it is killed."""
        try:
            if self._process.returncode is None:
                if self._process.stdin is not None:
                    self._process.stdin.close()
                with suppress(TimeoutError):
                    async with asyncio.timeout(_GRACE_SECONDS):
                        await self._process.wait()
        finally:
            # Also when the grace period is cancelled.
            if self._process.returncode is None:
                await kill_and_wait(self._process)
            self._errors.cancel()
        await asyncio.wait([self._errors])

    async def _read_errors(self) -> bytes:
        stderr, kept = self._process.stderr, b""
        assert stderr is not None
        while data := await stderr.read(4096):
            kept = (kept + data)[-_MAX_STDERR_BYTES:]
        return kept


async def set_pinned(
    cri: RuntimeConnection, pins: PinRecord, names: Iterable[str], *, pinned: bool
) -> frozenset[str]:
    """Pin or unpin images in the record and in containerd; return the changed names of the record.

    Raises PinError and CriError.
    """
    chosen = frozenset(names)
    changed = await finish_in_thread(lambda: pins.add(chosen) if pinned else pins.remove(chosen))
    if cri.version.runtime_name == "containerd":
        await ContainerdStore(cri.image_channel).set_pinned(chosen, pinned=pinned)
    return changed


def open_archive(path: Path) -> BinaryIO:
    """Open an archive that is a regular file. Raises ImportFailed."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError as err:
        raise ImportFailed(f"{path} cannot be read: {err.strerror}") from err
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise ImportFailed(f"{path} is not a file: give an archive, or - for standard input")
    return os.fdopen(descriptor, "rb")
