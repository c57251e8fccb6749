"""Pull intents and pulled records: which images the kubelet pulled, and with which credentials.

The records are in `<root-dir>/image_manager/pulling` and `pulled`, one file each, in the encoding of the
upstream kubelet (`kubelet.config.k8s.io/v1beta1`), so that either kubelet can use the other's records:

    pulling/sha256-<hash of image>     ImagePullIntent    written before a pull, deleted after its record
    pulled/sha256-<hash of imageRef>   ImagePulledRecord  credentials by image name without tag and digest

`PullRecordFiles` accesses the directories and blocks; `PullRecords` is a write-through LRU cache above it
that runs the blocking calls in threads. Every write is atomic and synced to disk. While a cache holds
everything that is on disk it is authoritative, and a lookup needs neither a thread nor the disk. A cancelled
write is completed first, so that cache and disk agree. A file that cannot be decoded is an error for its own
key only.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable, Collection, Iterable, Iterator, Mapping
from contextlib import asynccontextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Generic, Literal, TypeVar

import msgspec

from pykubelet.images.metrics import PullRecordMetrics
from pykubelet.logs import get_logger
from pykubelet.util.files import write_atomically
from pykubelet.util.tasks import finish_in_thread

log = get_logger(__name__)
API_VERSION = "kubelet.config.k8s.io/v1beta1"
MAX_RECORD_BYTES = 512 * 1024
"""Bytes of the largest file that is read or written."""
_DIRECTORY_MODE = 0o700
_FILE_MODE = 0o600
_PREFIX = "sha256-"
_TEMPORARY_SUFFIX = ".tmp"
_LOCK_STRIPES = 31
_NO_TIME = datetime(1, 1, 1, tzinfo=UTC)
T = TypeVar("T")
V = TypeVar("V")


class RecordError(Exception):
    """A record file exists but is invalid."""


class ImagePullSecret(
    msgspec.Struct, frozen=True, forbid_unknown_fields=True, rename={"credential_hash": "credentialHash"}
):
    """Coordinates of a secret and the hash of its credentials for the image."""

    uid: str = ""
    namespace: str = ""
    name: str = ""
    credential_hash: str = ""

    @property
    def coordinates(self) -> tuple[str, str, str]:
        """Namespace, name and UID."""
        return self.namespace, self.name, self.uid


class ImagePullServiceAccount(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Coordinates of a service account whose token a credential provider received."""

    uid: str = ""
    namespace: str = ""
    name: str = ""

    @property
    def coordinates(self) -> tuple[str, str, str]:
        """Namespace, name and UID."""
        return self.namespace, self.name, self.uid


class ImagePullCredentials(
    msgspec.Struct, frozen=True, forbid_unknown_fields=True, rename="camel", omit_defaults=True
):
    """Credentials that are known to pull an image."""

    kubernetes_secrets: tuple[ImagePullSecret, ...] = ()
    kubernetes_service_accounts: tuple[ImagePullServiceAccount, ...] = ()
    node_pods_accessible: bool = False
    """Whether every pod of the node has access: pulled without credentials, or with the node's own."""

    @property
    def empty(self) -> bool:
        """Whether no credentials are known to grant access."""
        return not (self.node_pods_accessible or self.kubernetes_secrets or self.kubernetes_service_accounts)


class ImagePulledRecord(msgspec.Struct, frozen=True):
    """Credentials of one image in the runtime, by the names under which it was pulled."""

    image_ref: str
    last_updated_time: datetime
    credential_mapping: Mapping[str, ImagePullCredentials] = {}


_Version = Literal["kubelet.config.k8s.io/v1beta1", "kubelet.config.k8s.io/v1alpha1"]


class _IntentFile(msgspec.Struct, forbid_unknown_fields=True, rename="camel"):
    kind: Literal["ImagePullIntent"]
    api_version: _Version
    image: str = ""


class _PulledFile(msgspec.Struct, forbid_unknown_fields=True, rename="camel"):
    kind: Literal["ImagePulledRecord"]
    api_version: _Version
    last_updated_time: datetime | None = None
    image_ref: str = ""
    credential_mapping: dict[str, ImagePullCredentials] = {}


def go_json(value: object) -> bytes:
    """Return JSON as Go's encoder writes it: compact, and `<`, `>`, `&` and line separators escaped."""
    text = json.dumps(value, separators=(",", ":"), ensure_ascii=False)
    for character in "<>&\u2028\u2029":
        text = text.replace(character, f"\\u{ord(character):04x}")
    return text.encode(errors="replace")


def encode_intent(image: str) -> bytes:
    """Return the content of a pull intent's file."""
    return go_json({"kind": "ImagePullIntent", "apiVersion": API_VERSION, "image": image}) + b"\n"


def encode_pulled(record: ImagePulledRecord) -> bytes:
    """Return the content of a pulled record's file."""
    time = record.last_updated_time.astimezone(UTC)
    document: dict[str, Any] = {
        "kind": "ImagePulledRecord",
        "apiVersion": API_VERSION,
        "lastUpdatedTime": None if time == _NO_TIME else f"{time:%Y-%m-%dT%H:%M:%SZ}",
        "imageRef": record.image_ref,
    }
    if record.credential_mapping:
        document["credentialMapping"] = {
            image: msgspec.to_builtins(record.credential_mapping[image])
            for image in sorted(record.credential_mapping)
        }
    return go_json(document) + b"\n"


class PullRecordFiles:
    """The records on disk; every method blocks and raises OSError."""

    def __init__(self, root_dir: Path) -> None:
        self._intents = root_dir / "image_manager" / "pulling"
        self._pulled = root_dir / "image_manager" / "pulled"

    def prepare(self) -> None:
        """Ensure that the directories exist, and delete the files of interrupted writes."""
        for directory in (self._intents.parent, self._intents, self._pulled):
            directory.mkdir(mode=_DIRECTORY_MODE, parents=True, exist_ok=True)
        for directory in (self._intents, self._pulled):
            for leftover in directory.glob(f".{_PREFIX}*"):
                leftover.unlink(missing_ok=True)

    def list_intents(self) -> tuple[list[str], list[str]]:
        """Return the images with a pull intent, and the errors of invalid files.

        Files of an older API version are rewritten.
        """
        intents, errors = _decode_all(self._intents, _IntentFile)
        for path, intent in intents:
            if intent.api_version != API_VERSION:
                _migrate(path, encode_intent(intent.image))
        return [intent.image for _, intent in intents], errors

    def intent_exists(self, image: str) -> bool:
        """Return whether an image has a pull intent. Raises RecordError."""
        intent = _decode(self._intents / _file_name(image), _IntentFile)
        return intent is not None and intent.image == image

    def write_intent(self, image: str) -> None:
        """Write a pull intent."""
        _write(self._intents / _file_name(image), encode_intent(image))

    def delete_intent(self, image: str) -> None:
        """Delete a pull intent, if it exists."""
        (self._intents / _file_name(image)).unlink(missing_ok=True)

    def count_intents(self) -> int:
        """Return the number of pull intents."""
        return sum(1 for _ in _record_files(self._intents))

    def list_pulled(self) -> tuple[list[ImagePulledRecord], list[str]]:
        """Return the pulled records, and the errors of invalid files.

        Files of an older API version are rewritten.
        """
        found, errors = _decode_all(self._pulled, _PulledFile)
        records = [_record(pulled) for _, pulled in found]
        for (path, pulled), record in zip(found, records, strict=True):
            if pulled.api_version != API_VERSION:
                _migrate(path, encode_pulled(record))
        return records, errors

    def get_pulled(self, image_ref: str) -> ImagePulledRecord | None:
        """Return an image's pulled record; None when it does not exist. Raises RecordError."""
        pulled = _decode(self._pulled / _file_name(image_ref), _PulledFile)
        return _record(pulled) if pulled is not None and pulled.image_ref == image_ref else None

    def write_pulled(self, record: ImagePulledRecord) -> None:
        """Write a pulled record."""
        _write(self._pulled / _file_name(record.image_ref), encode_pulled(record))

    def delete_pulled(self, image_ref: str) -> None:
        """Delete a pulled record, if it exists."""
        (self._pulled / _file_name(image_ref)).unlink(missing_ok=True)

    def count_pulled(self) -> int:
        """Return the number of pulled records."""
        return sum(1 for _ in _record_files(self._pulled))


class PullRecords:
    """A write-through cache of the records. The methods raise OSError and RecordError.

    Sizes are numbers of records. `open` must be called first.
    """

    def __init__(
        self, files: PullRecordFiles, metrics: PullRecordMetrics, *, intents_size: int, pulled_size: int
    ) -> None:
        self._files = files
        self._metrics = metrics
        self._intents: _Lru[str] = _Lru(intents_size)
        self._pulled: _Lru[ImagePulledRecord] = _Lru(pulled_size)
        self.intent_locks = StripedLocks()
        self.pulled_locks = StripedLocks()

    async def open(self) -> list[str]:
        """Prepare the directories, fill the caches, and return the images with a pull intent."""

        def read() -> tuple[tuple[list[str], list[str]], tuple[list[ImagePulledRecord], list[str]]]:
            self._files.prepare()
            return self._files.list_intents(), self._files.list_pulled()

        (intents, intent_errors), (pulled, pulled_errors) = await finish_in_thread(read)
        for error in [*intent_errors, *pulled_errors]:
            log.error(None, "Failed to read image pull record", err=error)
        self._intents.refresh(((image, image) for image in intents), complete=not intent_errors)
        self._pulled.refresh(((record.image_ref, record) for record in pulled), complete=not pulled_errors)
        self._metrics.intents(len(intents), self._intents.usage_percent)
        self._metrics.pulled_records(len(pulled), self._pulled.usage_percent)
        return intents

    def cached(self, image: str, image_ref: str) -> tuple[ImagePulledRecord | None, bool] | None:
        """Return an image's pulled record and whether it has an intent; None if the disk must be read."""
        record = self._pulled.get(image_ref)
        if record is None and not self._pulled.authoritative:
            return None
        intended = self._intents.get(image) is not None
        if record is None and not intended and not self._intents.authoritative:
            return None
        return record, intended

    async def intent_exists(self, image: str) -> bool:
        """Return whether an image has a pull intent. The caller holds the image's intent lock."""
        if self._intents.get(image) is not None:
            return True
        if self._intents.authoritative:
            return False
        exists = await finish_in_thread(lambda: self._files.intent_exists(image))
        if exists:
            self._intents.set(image, image)
        return exists

    async def write_intent(self, image: str) -> None:
        """Ensure that an image has a pull intent. The caller holds the image's intent lock."""
        if self._intents.get(image) is not None:
            return

        def write() -> int:
            self._files.write_intent(image)
            return self._files.count_intents()

        def cache(count: int) -> None:
            self._intents.set(image, image)
            self._metrics.intents(count, self._intents.usage_percent)

        await _durably(write, cache)

    async def delete_intent(self, image: str) -> None:
        """Delete an image's pull intent. The caller holds the image's intent lock."""

        def delete() -> int:
            self._files.delete_intent(image)
            return self._files.count_intents()

        def cache(count: int) -> None:
            self._intents.delete(image)
            self._metrics.intents(count, self._intents.usage_percent)

        await _durably(delete, cache)

    async def get_pulled(self, image_ref: str) -> ImagePulledRecord | None:
        """Return an image's pulled record; None if it does not exist. The caller holds its pulled lock."""
        record = self._pulled.get(image_ref)
        if record is not None or self._pulled.authoritative:
            return record
        record = await finish_in_thread(lambda: self._files.get_pulled(image_ref))
        if record is not None:
            self._pulled.set(image_ref, record)
        return record

    async def write_pulled(self, record: ImagePulledRecord) -> None:
        """Write a pulled record. The caller holds its pulled lock."""

        def write() -> int:
            self._files.write_pulled(record)
            return self._files.count_pulled()

        def cache(count: int) -> None:
            self._pulled.set(record.image_ref, record)
            self._metrics.pulled_records(count, self._pulled.usage_percent)

        await _durably(write, cache)

    async def prune_pulled(self, known: Collection[str], until: datetime) -> None:
        """Delete the pulled records of images not in `known` that were last updated before `until`."""
        keep, oldest = frozenset(known), until.replace(microsecond=0)
        pruned: list[str] = []

        def prune() -> tuple[list[ImagePulledRecord], list[str], int]:
            records, errors = self._files.list_pulled()
            for record in records:
                if record.image_ref not in keep and record.last_updated_time < oldest:
                    try:
                        self._files.delete_pulled(record.image_ref)
                    except OSError as err:
                        errors.append(str(err))
                    else:
                        pruned.append(record.image_ref)
            return records, errors, self._files.count_pulled()

        def cache(result: tuple[list[ImagePulledRecord], list[str], int]) -> None:
            records, errors, count = result
            for error in errors:
                log.error(None, "Failed to prune image pulled records", err=error)
            pruned_refs = set(pruned)
            for image_ref in pruned:
                self._pulled.delete(image_ref)
            if not self._pulled.authoritative:
                rest = (
                    (record.image_ref, record) for record in records if record.image_ref not in pruned_refs
                )
                self._pulled.refresh(rest, complete=not errors)
            self._metrics.pulled_records(count, self._pulled.usage_percent)

        async with self.pulled_locks.all():
            await _durably(prune, cache)


class StripedLocks:
    """A fixed number of locks, selected by key; two keys may share one."""

    def __init__(self) -> None:
        self._locks = [asyncio.Lock() for _ in range(_LOCK_STRIPES)]

    def for_key(self, key: str) -> asyncio.Lock:
        """Return the lock of a key."""
        return self._locks[hash(key) % len(self._locks)]

    @asynccontextmanager
    async def all(self) -> AsyncIterator[None]:
        """Hold all locks within the context."""
        held: list[asyncio.Lock] = []
        try:
            for lock in self._locks:
                await lock.acquire()
                held.append(lock)
            yield
        finally:
            for lock in held:
                lock.release()


class _Lru(Generic[V]):
    """An LRU cache."""

    def __init__(self, size: int) -> None:
        self._size = max(size, 1)
        self._values: OrderedDict[str, V] = OrderedDict()
        self.authoritative = False
        """Whether the cache holds all keys, so that a missing key does not exist."""

    @property
    def usage_percent(self) -> int:
        return len(self._values) * 100 // self._size

    def get(self, key: str) -> V | None:
        value = self._values.get(key)
        if value is not None:
            self._values.move_to_end(key)
        return value

    def set(self, key: str, value: V) -> None:
        self._values[key] = value
        self._values.move_to_end(key)
        if len(self._values) > self._size:
            self._values.popitem(last=False)
            self.authoritative = False

    def delete(self, key: str) -> None:
        self._values.pop(key, None)

    def refresh(self, items: Iterable[tuple[str, V]], *, complete: bool) -> None:
        """Replace the values by a listing; `complete`: whether the listing lacks nothing."""
        listed = list(items)
        authoritative = complete and len(listed) < self._size
        if authoritative or not self._values:
            self._values = OrderedDict(listed[: self._size])
            self.authoritative = authoritative


async def _durably(work: Callable[[], T], then: Callable[[T], None]) -> None:
    """Run blocking work in a thread, and apply its result even when the caller is cancelled."""
    results: list[T] = []
    try:
        await finish_in_thread(lambda: results.append(work()))
    finally:
        for result in results:
            then(result)


def _file_name(key: str) -> str:
    return f"{_PREFIX}{hashlib.sha256(key.encode()).hexdigest()}"


def _record_files(directory: Path) -> Iterator[Path]:
    with os.scandir(directory) as entries:
        for entry in entries:
            is_record = entry.name.startswith(_PREFIX) and not entry.name.endswith(_TEMPORARY_SUFFIX)
            if is_record and not entry.is_dir():
                yield Path(entry.path)


def _decode(path: Path, kind: type[T]) -> T | None:
    """Return a file's decoded content; None when it does not exist. Raises OSError and RecordError."""
    try:
        with path.open("rb") as file:
            content = file.read(MAX_RECORD_BYTES + 1)
    except FileNotFoundError:
        return None
    if len(content) > MAX_RECORD_BYTES:
        raise RecordError(f"cannot use {path}: larger than {MAX_RECORD_BYTES // 1024} KiB")
    try:
        return msgspec.json.decode(content, type=kind)
    except (msgspec.MsgspecError, ValueError, RecursionError) as err:
        raise RecordError(f"cannot decode {path}: {err}") from err


def _decode_all(directory: Path, kind: type[T]) -> tuple[list[tuple[Path, T]], list[str]]:
    """Return the files of a directory with their contents, and the errors of invalid files."""
    found, errors = [], []
    for path in _record_files(directory):
        try:
            if (content := _decode(path, kind)) is not None:
                found.append((path, content))
        except (RecordError, OSError) as err:
            errors.append(str(err))
    return found, errors


def _migrate(path: Path, content: bytes) -> None:
    try:
        _write(path, content)
    except OSError as err:
        log.error(err, "Failed to migrate image pull record to the current version", path=str(path))


def _record(file: _PulledFile) -> ImagePulledRecord:
    time = file.last_updated_time or _NO_TIME
    if time.tzinfo is None:
        time = time.replace(tzinfo=UTC)
    return ImagePulledRecord(file.image_ref, time, file.credential_mapping)


def _write(path: Path, content: bytes) -> None:
    # With a synced directory: a power failure that undid the rename would make a pulled image look preloaded.
    write_atomically(path, content, _FILE_MODE, sync_directory=True)
