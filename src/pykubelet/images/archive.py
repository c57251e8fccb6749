"""Check of image archives (OCI layout, `docker save`) before the runtime imports them.

The import itself is containerd's. `check_archive` reads the whole archive once and finds out what an
operator should learn in one line instead of from containerd's log: a file that is not an image archive, is
incomplete or damaged (each blob against its digest), has members with paths outside of the archive, or
images without a name.

Archives are untrusted: documents, names, the number of members, and the bytes of archive and layers, also
decompressed, are bounded. The expanded layers must fit on the disk. All functions block: call them in a
thread.
"""

from __future__ import annotations

import hashlib
import posixpath
import re
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import BinaryIO, TypeVar

import msgspec

from pykubelet.images.image_reference import InvalidImageName, parse_image_name
from pykubelet.images.tar_reader import CHUNK_BYTES, Member, TarError, TarReader
from pykubelet.util.text import format_size, quoted

T = TypeVar("T")
MAX_DOCUMENT_BYTES = 1024 * 1024
"""Bytes of an index or a manifest."""
MAX_MEMBERS = 5000
MAX_IMAGES = 500
_MAX_DOCUMENTS = 500
_GZIP = b"\x1f\x8b"
_OTHER_COMPRESSIONS = {b"\x28\xb5\x2f\xfd": "zstd -d", b"\xfd7zXZ": "unxz", b"BZh": "bunzip2"}
_BLOB = re.compile(r"blobs/(sha256|sha512)/([0-9a-f]+)", re.ASCII)
_NAME_ANNOTATIONS = ("io.containerd.image.name", "org.opencontainers.image.ref.name")
_INDEX_TYPES = (
    "application/vnd.oci.image.index.v1+json",
    "application/vnd.docker.distribution.manifest.list.v2+json",
)


class ArchiveError(Exception):
    """Raised when an archive cannot be imported; the text completes "FILE …" in one line with a remedy."""


@dataclass(frozen=True, slots=True)
class ArchiveContents:
    """Contents of an archive that passed the check."""

    names: tuple[str, ...]
    """Full names of the images, such as `docker.io/library/busybox:1`."""
    digest: str
    """SHA-256 of the file."""
    is_gzip: bool
    """Whether the whole file is compressed."""


class _Descriptor(msgspec.Struct, rename="camel"):
    digest: str
    size: int
    media_type: str = ""
    annotations: dict[str, str] = {}


class _Index(msgspec.Struct):
    manifests: list[_Descriptor]


class _Manifest(msgspec.Struct):
    config: _Descriptor
    layers: list[_Descriptor]


class _DockerImage(msgspec.Struct, rename="pascal"):
    config: str
    layers: list[str]
    repo_tags: list[str] | None = None


@dataclass(slots=True)
class _Found:
    """Members of an archive, as far as the check needs them."""

    files: dict[str, int] = field(default_factory=dict)
    """Sizes of the regular files and links by path."""
    documents: dict[str, bytes] = field(default_factory=dict)
    """Contents of the files that may be indexes or manifests."""
    expanded: int = 0
    """Bytes of all blobs, decompressed."""


class _Bounded:
    """A source that counts and hashes what is read from it, and ends with an error above a limit."""

    def __init__(self, source: BinaryIO, limit: int, check_cancelled: Callable[[], None]) -> None:
        self._source = source
        self._limit = limit
        self._check_cancelled = check_cancelled
        self._count = 0
        self._hash = hashlib.sha256()

    @property
    def hexdigest(self) -> str:
        return self._hash.hexdigest()

    def read(self, size: int, /) -> bytes:
        self._check_cancelled()
        data = self._source.read(size)
        self._count += len(data)
        if self._count > self._limit:
            raise _too_large(self._limit)
        self._hash.update(data)
        return data


class Gunzip:
    """Decompressing source; raises TarError for damaged data and ArchiveError above the limit."""

    def __init__(self, source: BinaryIO | _Bounded, limit: int) -> None:
        self._source = source
        self._left = limit
        self._limit = limit
        self._inflate = zlib.decompressobj(wbits=31)
        self._pending = b""

    def read(self, size: int, /) -> bytes:
        """Return up to `size` bytes; none at the end."""
        while True:
            if self._inflate.eof:
                # Further members of a gzip file may follow.
                rest = self._inflate.unused_data or self._source.read(CHUNK_BYTES)
                if not rest.strip(b"\0"):
                    return b""
                self._inflate, self._pending = zlib.decompressobj(wbits=31), rest
            elif not self._pending:
                self._pending = self._source.read(CHUNK_BYTES)
                if not self._pending:
                    raise TarError("ends too early: its gzip data is incomplete")
            try:
                data = self._inflate.decompress(self._pending, size)
            except zlib.error:
                raise TarError("has damaged gzip data") from None
            self._pending = self._inflate.unconsumed_tail
            self._left -= len(data)
            if self._left < 0:
                raise _too_large(self._limit)
            if data:
                return data


def check_archive(
    file: BinaryIO, limit: int, check_cancelled: Callable[[], None] = lambda: None, *, base_name: str = ""
) -> ArchiveContents:
    """Check the archive in a file that can seek, whose layers may have `limit` bytes when they are extracted.

    `base_name` is the repository of images that have only a tag. `check_cancelled` is called often, and may
    raise. Raises ArchiveError and OSError.
    """
    file.seek(0)
    start = file.read(6)
    file.seek(0)
    if tool := next((tool for magic, tool in _OTHER_COMPRESSIONS.items() if start.startswith(magic)), None):
        raise ArchiveError(f"is compressed in a format that is not supported: decompress it with {tool}")
    is_gzip = start.startswith(_GZIP)
    source = _Bounded(file, limit, check_cancelled)
    try:
        archive = Gunzip(source, limit) if is_gzip else source
        found = _read_members(TarReader(archive), limit)
        while archive.read(CHUNK_BYTES):
            pass  # the rest belongs to the digest, and to the check of gzip
    except TarError as err:
        raise ArchiveError(str(err)) from None
    names = _image_names(found, base_name)
    return ArchiveContents(tuple(dict.fromkeys(names)), f"sha256:{source.hexdigest}", is_gzip)


def _read_members(archive: TarReader, limit: int) -> _Found:
    found = _Found()
    for count, member in enumerate(archive, 1):
        if count > MAX_MEMBERS:
            raise ArchiveError(f"has more than {MAX_MEMBERS} members: it is not an image archive")
        path = _safe_path(member.name)
        if member.is_directory:
            continue
        if member.is_link:
            _safe_path(posixpath.join(posixpath.dirname(path), member.link))
            found.files[path] = 0
        elif not member.is_file:
            raise ArchiveError(f"has a special file {quoted(path)}: it is not an image archive")
        else:
            found.files[path] = member.size
            _read_file(path, member, found, limit)
    return found


def _safe_path(name: str) -> str:
    path = posixpath.normpath(name)
    if path.startswith(("/", "../")) or path == "..":
        raise ArchiveError(f"has the path {quoted(name)}, which leads out of it: do not trust its source")
    return path


def _read_file(path: str, member: Member, found: _Found, limit: int) -> None:
    """Read one file: verify a blob's digest, measure what layers expand to, keep documents."""
    blob = _BLOB.fullmatch(path)
    digest = hashlib.new(blob[1]) if blob is not None else None
    meter: _Expansion | None = None
    is_named = path in ("index.json", "manifest.json")
    if is_named and member.size > MAX_DOCUMENT_BYTES:
        raise ArchiveError(
            f"has a {path} of {format_size(member.size)}: at most {format_size(MAX_DOCUMENT_BYTES)} is read"
        )
    kept, is_kept = bytearray(), False
    for number, chunk in enumerate(member.chunks()):
        if number == 0:
            meter = _Expansion(limit - found.expanded) if chunk.startswith(_GZIP) else None
            may_be_document = blob is not None and chunk.lstrip()[:1] == b"{"
            is_kept = is_named or (may_be_document and member.size <= MAX_DOCUMENT_BYTES)
        if digest is not None:
            digest.update(chunk)
        if meter is not None:
            meter.feed(chunk)
        if is_kept:
            kept += chunk
    found.expanded += meter.size if meter is not None else member.size
    if found.expanded > limit:
        raise _too_large(limit)
    if digest is not None and blob is not None and digest.hexdigest() != blob[2]:
        raise ArchiveError(f"is damaged: the content of {path} does not match its digest; copy it again")
    if kept:
        found.documents[path] = bytes(kept)
        if len(found.documents) > _MAX_DOCUMENTS:
            raise ArchiveError(f"has more than {_MAX_DOCUMENTS} manifests")


class _Expansion:
    """Decompressed size of a gzip layer."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._inflate = zlib.decompressobj(wbits=31)
        self.size = 0

    def feed(self, chunk: bytes) -> None:
        """Count what a part of the layer expands to; damaged data is left to the runtime to report."""
        pending = chunk
        while pending and not self._inflate.eof:
            try:
                self.size += len(self._inflate.decompress(pending, CHUNK_BYTES))
            except zlib.error:
                return
            pending = self._inflate.unconsumed_tail
            if self.size > self._limit:
                raise ArchiveError(
                    "has layers that expand to more than the "
                    f"{format_size(max(self._limit, 0))} that are free: "
                    "free disk space, or do not trust its source"
                )


def _image_names(found: _Found, base_name: str) -> Iterator[str]:
    """Yield the names of the images, which are complete. Raises ArchiveError."""
    if "index.json" in found.files:
        names = list(_oci_names(found, base_name))
    elif "manifest.json" in found.files:
        names = list(_docker_names(found))
    else:
        raise ArchiveError(
            "is not an image archive: it has neither index.json nor manifest.json; "
            "write it with `docker save`, `podman save` or `pykubelet images save`"
        )
    if not names:
        raise ArchiveError("has no image with a name: save it by its name and tag, not by its id")
    if len(names) > MAX_IMAGES:
        raise ArchiveError(f"has more than {MAX_IMAGES} images")
    for name in names:
        try:
            parsed = parse_image_name(name)
        except InvalidImageName as err:
            raise ArchiveError(f"has an image with an invalid name: {err}") from None
        yield f"{parsed.repository}:{parsed.tag}" if parsed.tag else f"{parsed.repository}@{parsed.digest}"


def _oci_names(found: _Found, base_name: str) -> Iterator[str]:
    index = _decode(found, "index.json", _Index)
    if len(index.manifests) > MAX_IMAGES:
        raise ArchiveError(f"has more than {MAX_IMAGES} images")
    for descriptor in index.manifests:
        _check_manifest(found, descriptor)
        name = next(filter(None, (descriptor.annotations.get(key) for key in _NAME_ANNOTATIONS)), "")
        if not name:
            continue
        if "/" not in name and ":" not in name:
            # Only a tag.
            if not base_name:
                raise ArchiveError(
                    f"has an image with only the tag {quoted(name)}: give its name with --name"
                )
            name = f"{base_name}:{name}"
        yield name


def _docker_names(found: _Found) -> Iterator[str]:
    for image in _decode(found, "manifest.json", list[_DockerImage]):
        for path in (image.config, *image.layers):
            if posixpath.normpath(path) not in found.files:
                raise ArchiveError(f"is incomplete: {quoted(path)} of an image is missing; save it again")
        yield from image.repo_tags or ()


def _check_manifest(found: _Found, descriptor: _Descriptor) -> None:
    """Check that the blobs of an image are present with their sizes; of an index, those of one platform."""
    path = _blob_path(descriptor)
    if _size_of(found, descriptor) > MAX_DOCUMENT_BYTES:
        raise ArchiveError(f"has a manifest of more than {format_size(MAX_DOCUMENT_BYTES)}")
    if descriptor.media_type in _INDEX_TYPES:
        index = _decode(found, path, _Index)
        present = [item for item in index.manifests if _blob_path(item) in found.files]
        if not present:
            raise ArchiveError("is incomplete: no platform of an image is in it; save it again")
        for item in present:
            if item.media_type in _INDEX_TYPES:
                raise ArchiveError("has an index in an index: it is not an image archive")
            _check_manifest(found, item)
        return
    manifest = _decode(found, path, _Manifest)
    for blob in (manifest.config, *manifest.layers):
        _size_of(found, blob)


def _size_of(found: _Found, descriptor: _Descriptor) -> int:
    size = found.files.get(_blob_path(descriptor))
    if size is None:
        raise ArchiveError(f"is incomplete: {quoted(descriptor.digest)} is missing; save or copy it again")
    if size != descriptor.size:
        raise ArchiveError(
            f"is damaged: {quoted(descriptor.digest)} has {size} bytes instead of {descriptor.size}; "
            "copy it again"
        )
    return size


def _blob_path(descriptor: _Descriptor) -> str:
    return f"blobs/{descriptor.digest.replace(':', '/', 1)}"


def _decode(found: _Found, path: str, kind: type[T]) -> T:
    try:
        return msgspec.json.decode(found.documents.get(path, b""), type=kind)
    except (msgspec.MsgspecError, UnicodeError, RecursionError) as err:
        raise ArchiveError(f"has an invalid {quoted(path)}: {err}") from None


def _too_large(limit: int) -> ArchiveError:
    return ArchiveError(
        f"needs more than the {format_size(max(limit, 0))} that are free on the disk of the images: "
        "free disk space, such as with `pykubelet images prune`"
    )


def open_payload(file: BinaryIO, contents: ArchiveContents, limit: int) -> BinaryIO | Gunzip:
    """Return the uncompressed archive from its start."""
    file.seek(0)
    return Gunzip(file, limit) if contents.is_gzip else file
