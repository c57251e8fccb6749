"""Progress of pulls on containerd, from the downloads in its content store.

containerd names a download after the digest of its layer, not after an image. The layers of a pull are
those of its manifest, which containerd stores before the first layer:

- an image with a digest: the manifest, or the one manifest of that index that is present;
- an image with a tag: the manifest with the label of this repository that was stored since the pull
  started, or else the one whose layers are being received.

A pull is measured only when exactly one manifest qualifies and no other pull of the same repository is in
progress without a digest: a wrong number is worse than none.

Manifests come from registries: their size, the number of layers, and the number of blobs that are looked at
per measurement have bounds, above which the progress is unknown.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

import msgspec

from pykubelet.cri.containerd_store import Blob, ContainerdStore
from pykubelet.images.pull_tracker import LayerProgress, RunningPull
from pykubelet.logs import get_logger
from pykubelet.transport.errors import BadResponse, NotFound

log = get_logger(__name__)
MAX_MANIFEST_BYTES = 256 * 1024
MAX_LAYERS = 256
MAX_BLOBS = 512
"""Blobs of a repository, above which its manifests are not searched."""
MAX_READS = 16
"""Blobs that are read per measurement."""
_MAX_SIZE = 2**50
_LAYER = "layer-"
_SOURCE = "containerd.io/distribution.source"
_DIGEST = re.compile(r"sha(256|512):[0-9a-f]{64,128}", re.ASCII)


class _Descriptor(msgspec.Struct):
    digest: str
    size: int


class _Document(msgspec.Struct):
    """A manifest, with layers, or an index, with manifests; anything else has neither."""

    layers: list[_Descriptor] = []
    manifests: list[_Descriptor] = []


Layers = Mapping[str, int]
"""Sizes of the layers of a manifest, by digest."""


@dataclass(frozen=True, slots=True)
class Manifest:
    """A manifest in the content store."""

    blob: Blob
    layers: Layers


def parse_layers(content: bytes) -> tuple[Layers | None, list[str]]:
    """Return the layers of a manifest, None for another document; and the manifests of an index."""
    try:
        document = msgspec.json.decode(content, type=_Document)
    except (msgspec.MsgspecError, UnicodeError, RecursionError):
        return None, []
    if len(document.layers) > MAX_LAYERS or len(document.manifests) > MAX_LAYERS:
        return None, []
    found = [*document.layers, *document.manifests]
    if any(not _DIGEST.fullmatch(item.digest) or not 0 <= item.size <= _MAX_SIZE for item in found):
        return None, []
    layers = {layer.digest: layer.size for layer in document.layers}
    return layers or None, [item.digest for item in document.manifests]


def choose_manifest(
    manifests: Sequence[Manifest], started: float, receiving: Collection[str]
) -> Manifest | None:
    """Return the manifest of a pull that started at this time, None unless it is certain."""
    for certain in (
        [item for item in manifests if item.blob.created >= started],
        [item for item in manifests if not item.layers.keys().isdisjoint(receiving)],
    ):
        if len(certain) == 1:
            return certain[0]
    return None


def compute_progress(
    layers: Layers, started: float, present: Iterable[Blob], received: Mapping[str, int]
) -> LayerProgress:
    """Return the progress of a pull from the layers in the store, and the bytes of those being received.

    Layers that were in the store before the pull count as done layers, but not as bytes.
    """
    created = {blob.digest: blob.created for blob in present if blob.digest in layers}
    done = total = 0
    for digest, size in layers.items():
        if digest not in created:
            total += size
            done += min(received.get(digest, 0), size)
        elif created[digest] >= started:
            total += size
            done += size
    return LayerProgress(done, total, len(created), len(layers))


def source_filter(repository: str) -> str:
    """Return the filter for the blobs that containerd has pulled from a repository."""
    host, _, path = repository.partition("/")
    # containerd omits the port.
    host = host.rpartition(":")[0] if re.search(r":[0-9]+$", host) else host
    pattern = f"(^|,){re.escape(path)}(,|$)".replace("\\", "\\\\")
    return f'labels."{_SOURCE}.{host.strip("[]")}"~="{pattern}"'


class ContainerdProgress:
    """Measures pulls; keeps the layers of each pull in progress, so that a manifest is read once."""

    def __init__(self, store: ContainerdStore) -> None:
        self._store = store
        self._layers: dict[int, Layers] = {}
        self._parsed: dict[str, tuple[Layers | None, list[str]]] = {}
        """Documents of the pulls in progress, by digest."""

    async def measure(self, pulls: Sequence[RunningPull]) -> Mapping[int, LayerProgress]:
        """Return the progress of the pulls for which it is certain, by their id. Raises CriError."""
        received = {
            ingest.ref.removeprefix(_LAYER): ingest.received
            for ingest in await self._store.list_ingests()
            if ingest.ref.startswith(_LAYER)
        }
        self._layers = {pull.id: self._layers[pull.id] for pull in pulls if pull.id in self._layers}
        by_tag = Counter(pull.name.repository for pull in pulls if not pull.name.digest)
        reads = _Reads()
        for pull in pulls:
            if pull.id in self._layers or (not pull.name.digest and by_tag[pull.name.repository] > 1):
                continue
            if (layers := await self._find_layers(pull, received, reads)) is not None:
                self._layers[pull.id] = layers
        self._parsed = {digest: self._parsed[digest] for digest in reads.used}
        found = {}
        for pull in pulls:
            if (known := self._layers.get(pull.id)) is not None:
                present = await self._store.list_blobs([f"digest=={digest}" for digest in known], len(known))
                found[pull.id] = compute_progress(known, pull.started, present, received)
        return found

    async def _find_layers(
        self, pull: RunningPull, receiving: Collection[str], reads: _Reads
    ) -> Layers | None:
        if pull.name.digest:
            return await self._layers_of(pull.name.digest, reads)
        blobs = await self._store.list_blobs([source_filter(pull.name.repository)], MAX_BLOBS + 1)
        if len(blobs) > MAX_BLOBS:
            log.v(4).info("Repository has too many blobs to find the manifest", image=pull.name.original)
            return None
        small = [blob for blob in blobs if blob.size <= MAX_MANIFEST_BYTES]
        manifests = []
        for blob in sorted(small, key=lambda blob: -blob.created):
            layers, _ = await self._parse(blob.digest, reads)
            if layers is not None:
                manifests.append(Manifest(blob, layers))
        chosen = choose_manifest(manifests, pull.started, receiving)
        return chosen.layers if chosen is not None else None

    async def _layers_of(self, digest: str, reads: _Reads) -> Layers | None:
        """Return the layers of a manifest, or of the only present manifest of an index."""
        layers, manifests = await self._parse(digest, reads)
        if layers is not None or not manifests:
            return layers
        filters = [f"digest=={item}" for item in manifests]
        present = {blob.digest for blob in await self._store.list_blobs(filters, len(filters))}
        if len(present) != 1:
            return None
        return (await self._parse(present.pop(), reads))[0]

    async def _parse(self, digest: str, reads: _Reads) -> tuple[Layers | None, list[str]]:
        if digest not in self._parsed:
            if reads.left <= 0:
                return None, []
            reads.left -= 1
            try:
                content = await self._store.read_blob(digest, MAX_MANIFEST_BYTES)
            except (NotFound, BadResponse):
                # Not received yet, or larger than the bound.
                return None, []
            self._parsed[digest] = parse_layers(content)
        reads.used.add(digest)
        return self._parsed[digest]


class _Reads:
    """Budget of one measurement for reading blobs, and the blobs that it used."""

    def __init__(self) -> None:
        self.left = MAX_READS
        self.used: set[str] = set()
