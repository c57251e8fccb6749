"""What pods have, apart from what their authors wish: two small books that outlive the agent.

`allocated_pods_state` says what the node has promised to each pod, `actuated_pods_state` what its containers
were last set to. While all is quiet both say what the pods' specs say; after a resize they tell how far it
got, whoever was killed in between. The files are the reference's, checksum and all, so that a node can be
handed over in either direction, and a damaged file is never guessed about.

Starting pods must not wait for the disk: new entries are written some moments later, those of many pods
together. If the agent is killed before that, a pod is taken as its spec says. What must not be forgotten (a
new promise, a container set anew) is `put_for_good`.
"""

from __future__ import annotations

import asyncio
import functools
import threading
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any

import msgspec

from pykubelet.api.fnv import fnv1a_32
from pykubelet.api.meta import from_document, to_document
from pykubelet.api.pod import ResourceRequirements
from pykubelet.logs import get_logger
from pykubelet.pods.handover import write_atomically
from pykubelet.resources.hints import PolicyError
from pykubelet.tasks import finish_in_thread

log = get_logger(__name__)

ALLOCATED, ACTUATED = "allocated_pods_state", "actuated_pods_state"
WRITE_SECONDS = 10.0
"""How long new entries wait for others to be written with them."""
AGAIN_SECONDS = 30.0
"""When to try again to write what could not be written."""

_PRIVATE = 0o600


class PodResources(msgspec.Struct, frozen=True):
    """Resources of a pod's containers by name, and of the pod as a whole where it has some."""

    containers: Mapping[str, ResourceRequirements] = {}
    whole: ResourceRequirements | None = None


class ResourceBook:
    """Pods' resources by uid, in memory and in a file; without a file in memory only."""

    def __init__(self, file: Path | None = None, entries: Mapping[str, PodResources] | None = None) -> None:
        self._file = file
        self._entries = dict(entries or {})
        self._number = 0
        self._written = 0
        self._lock = threading.Lock()
        self.changed = asyncio.Event()
        """Set while something is to be written."""
        self._listeners: list[Callable[[str], None]] = []

    def add_listener(self, listener: Callable[[str], None]) -> None:
        """Call `listener` with the uid of each pod whose resources changed; it must not block."""
        self._listeners.append(listener)

    def of(self, uid: str) -> PodResources | None:
        """Give a pod's resources, if they are known."""
        return self._entries.get(uid)

    def __len__(self) -> int:
        return len(self._entries)

    def put(self, uid: str, resources: PodResources) -> None:
        """Take a pod's resources; the file follows later."""
        if self._entries.get(uid) != resources:
            self._entries[uid] = resources
            self.changed.set()
            self._notify(uid)

    def put_for_good(self, uid: str, resources: PodResources) -> None:
        """Take a pod's resources and have them on the disk; raises OSError, and then nothing has changed."""
        known = self._entries.get(uid)
        self.put(uid, resources)
        try:
            self.write()
        except OSError:
            self._entries.pop(uid)
            if known is not None:
                self._entries[uid] = known
            self._notify(uid)
            self.changed.set()  # entries of others may have waited for this
            raise

    def forget(self, uid: str) -> None:
        """Drop a pod that is gone; the file forgets it with the next change."""
        self._entries.pop(uid, None)
        self._notify(uid)

    def keep_only(self, uids: Collection[str]) -> None:
        """Drop all pods but these."""
        for uid in self._entries.keys() - uids:
            self.forget(uid)

    def _notify(self, uid: str) -> None:
        for listener in self._listeners:
            listener(uid)

    def write(self) -> None:
        """Have the file say what is known now; raises OSError."""
        self._save(*self._version())

    async def write_behind(self) -> None:
        """Keep the file up to date, without haste and without holding others up."""
        while True:
            await self.changed.wait()
            await asyncio.sleep(WRITE_SECONDS)
            number, content = self._version()
            try:
                await finish_in_thread(functools.partial(self._save, number, content))
            except OSError as err:
                log.error(err, "Could not write what pods have, will be tried again", file=str(self._file))
                self.changed.set()
                await asyncio.sleep(AGAIN_SECONDS)

    def close(self) -> None:
        """Write what is still to be written; a failure is only told: nothing is lost but what is new."""
        if not self.changed.is_set():
            return
        try:
            self.write()
        except OSError as err:
            log.error(err, "Could not write what pods have", file=str(self._file))

    def _version(self) -> tuple[int, bytes]:
        self.changed.clear()
        self._number += 1
        return self._number, encode(self._entries) if self._file is not None else b""

    def _save(self, number: int, content: bytes) -> None:
        with self._lock:
            if self._file is None or number < self._written:
                return  # somebody else has written a newer one meanwhile
            write_atomically(self._file, content, _PRIVATE)
            self._written = number


class ResizeBooks(msgspec.Struct, frozen=True):
    """Both books of a node."""

    allocated: ResourceBook
    actuated: ResourceBook

    async def write_behind(self) -> None:
        """Keep both files up to date until cancelled; what is new is written at last."""
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(self.allocated.write_behind())
                group.create_task(self.actuated.write_behind())
        finally:
            self.allocated.close()
            self.actuated.close()


def no_books() -> ResizeBooks:
    """Give books that nobody writes down."""
    return ResizeBooks(ResourceBook(), ResourceBook())


def read_books(folder: Path) -> ResizeBooks:
    """Open the books of a node; raises PolicyError when one is there and not sound."""
    return ResizeBooks(_open(folder / ALLOCATED), _open(folder / ACTUATED))


def _open(file: Path) -> ResourceBook:
    try:
        content = file.read_bytes()
    except FileNotFoundError:
        return ResourceBook(file)
    except OSError as err:
        raise PolicyError(f"cannot read what pods have: {err}") from err
    try:
        return ResourceBook(file, decode(content))
    except ValueError as err:
        raise PolicyError(
            f"what pods have cannot be known from {file}: {err}. Drain this node and delete that file"
        ) from err


def encode(entries: Mapping[str, PodResources]) -> bytes:
    """Give a file's content; the same entries give the same bytes."""
    document = {
        uid: {
            "ContainerResources": _sorted({name: _document(one) for name, one in pod.containers.items()}),
            "PodLevelResources": None if pod.whole is None else _document(pod.whole),
        }
        for uid, pod in sorted(entries.items())
    }
    data = msgspec.json.encode({"entries": document} if document else {}).decode()
    return msgspec.json.encode({"data": data, "checksum": _checksum(data)})


def decode(content: bytes) -> dict[str, PodResources]:
    """Read a file's content; raises ValueError saying what is wrong."""
    try:
        found = msgspec.json.decode(content, type=_File)
        data = msgspec.json.decode(found.data, type=_Data)
    except (msgspec.MsgspecError, UnicodeDecodeError) as err:
        raise ValueError(f"it is not what an agent writes ({err})") from err
    if found.checksum != _checksum(found.data):
        raise ValueError("it is damaged or was edited: its checksum does not match its content")
    return {
        uid: PodResources(
            {
                name: from_document(ResourceRequirements, one or {})
                for name, one in (pod.containers or {}).items()
            },
            None if pod.whole is None else from_document(ResourceRequirements, pod.whole),
        )
        for uid, pod in (data.entries or {}).items()
    }


class _File(msgspec.Struct):
    data: str
    checksum: int


class _Entry(msgspec.Struct):
    containers: dict[str, Any] | None = msgspec.field(name="ContainerResources", default=None)
    whole: dict[str, Any] | None = msgspec.field(name="PodLevelResources", default=None)


class _Data(msgspec.Struct):
    entries: dict[str, _Entry] | None = None


def _document(one: ResourceRequirements) -> dict[str, Any]:
    document: dict[str, Any] = to_document(one)
    return {
        key: _sorted(value) if isinstance(value, dict) else value for key, value in document.items() if value
    }


def _sorted(document: Mapping[str, Any]) -> dict[str, Any]:
    return dict(sorted(document.items()))


def _checksum(data: str) -> int:
    # What the reference hashes is how Go's debugging printer shows the text.
    return fnv1a_32(f"(string){data}".encode())
