"""Relation of containerd's downloads to images: only what is certain, and within bounds."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import pytest

from pykubelet.cri.containerd_store import Blob, ContainerdStore, Ingest
from pykubelet.images.containerd_progress import (
    MAX_BLOBS,
    MAX_LAYERS,
    MAX_READS,
    ContainerdProgress,
    compute_progress,
    parse_layers,
    source_filter,
)
from pykubelet.images.image_reference import parse_image_name
from pykubelet.images.pull_tracker import LayerProgress, RunningPull
from pykubelet.transport.errors import NotFound

REPOSITORY = "example.com:5000/team/app"
START = 1000.0


def digest(number: int) -> str:
    return f"sha256:{number:064x}"


def manifest(*layers: tuple[int, int]) -> bytes:
    return json.dumps({"layers": [{"digest": digest(n), "size": size} for n, size in layers]}).encode()


@dataclass
class FakeStore:
    """A content store; `blobs` are all of one repository."""

    ingests: list[Ingest] = field(default_factory=list)
    blobs: dict[str, Blob] = field(default_factory=dict)
    contents: dict[str, bytes] = field(default_factory=dict)
    reads: list[str] = field(default_factory=list)

    def add(self, number: int, content: bytes, created: float = START + 1, size: int | None = None) -> str:
        name = digest(number)
        self.blobs[name] = Blob(name, len(content) if size is None else size, created)
        self.contents[name] = content
        return name

    async def list_ingests(self) -> list[Ingest]:
        return self.ingests

    async def list_blobs(self, filters: Sequence[str], limit: int) -> list[Blob]:
        chosen = {item.removeprefix("digest==") for item in filters if item.startswith("digest==")}
        return [blob for blob in self.blobs.values() if not chosen or blob.digest in chosen][:limit]

    async def read_blob(self, digest: str, max_bytes: int) -> bytes:
        self.reads.append(digest)
        if digest not in self.contents:
            raise NotFound("Read", "NotFound", digest)
        return self.contents[digest]


def pull(number: int, image: str = f"{REPOSITORY}:1") -> RunningPull:
    return RunningPull(number, parse_image_name(image), START)


@pytest.fixture
def store() -> FakeStore:
    return FakeStore()


@pytest.fixture
def progress(store: FakeStore) -> ContainerdProgress:
    return ContainerdProgress(cast(ContainerdStore, store))


async def test_measure_tag_layers_in_all_states_are_counted(
    progress: ContainerdProgress, store: FakeStore
) -> None:
    store.add(1, manifest((10, 100), (11, 200), (12, 400), (13, 800)))
    store.add(2, b"{}")
    store.add(10, b"", created=START - 50, size=100)
    store.add(11, b"", size=200)
    store.ingests = [Ingest(f"layer-{digest(12)}", 50), Ingest(f"layer-{digest(99)}", 7), Ingest("other", 9)]
    for _ in range(2):
        assert await progress.measure([pull(0)]) == {0: LayerProgress(250, 1400, 2, 4)}
    assert store.reads.count(digest(1)) == 1


async def test_measure_two_tags_of_a_repository_are_unknown(
    progress: ContainerdProgress, store: FakeStore
) -> None:
    store.add(1, manifest((10, 100)))
    by_digest = f"{REPOSITORY}@{digest(1)}"
    assert await progress.measure([pull(0), pull(1, f"{REPOSITORY}:2")]) == {}
    found = await progress.measure([pull(0), pull(1, by_digest)])
    assert found == {0: LayerProgress(0, 100, 0, 1), 1: LayerProgress(0, 100, 0, 1)}


async def test_measure_two_new_manifests_only_the_received_one_qualifies(
    progress: ContainerdProgress, store: FakeStore
) -> None:
    store.add(1, manifest((10, 100)))
    store.add(2, manifest((20, 100)))
    assert await progress.measure([pull(0)]) == {}
    store.ingests = [Ingest(f"layer-{digest(20)}", 1)]
    assert await progress.measure([pull(0)]) == {0: LayerProgress(1, 100, 0, 1)}


async def test_measure_index_with_one_present_platform_is_followed(
    progress: ContainerdProgress, store: FakeStore
) -> None:
    entries = [{"digest": digest(number), "size": 5} for number in (1, 2)]
    store.add(9, json.dumps({"manifests": entries}).encode())
    image = f"{REPOSITORY}@{digest(9)}"
    assert await progress.measure([pull(0, image)]) == {}
    store.add(2, manifest((20, 100)))
    assert await progress.measure([pull(0, image)]) == {0: LayerProgress(0, 100, 0, 1)}


async def test_measure_hostile_repository_is_bounded(progress: ContainerdProgress, store: FakeStore) -> None:
    for number in range(1, MAX_READS + 20):
        store.add(number, manifest((number + 1000, 1)))
    assert await progress.measure([pull(0)]) == {}
    assert len(store.reads) == MAX_READS
    for number in range(5000, 5001 + MAX_BLOBS):
        store.add(number, b"")
    store.reads.clear()
    assert await progress.measure([pull(1)]) == {}
    assert store.reads == []


@pytest.mark.parametrize(
    "document",
    [
        b"\xff",
        b"[" * 100_000,
        {"layers": [{"digest": "../../etc/passwd", "size": 1}]},
        {"layers": [{"digest": digest(1), "size": -1}]},
        {"layers": [{"digest": digest(1), "size": 2**60}]},
        {"layers": [{"digest": digest(n), "size": 1} for n in range(MAX_LAYERS + 1)]},
    ],
)
def test_parse_layers_hostile_manifest_has_none(document: Any) -> None:
    content = document if isinstance(document, bytes) else json.dumps(document).encode()
    assert parse_layers(content) == (None, [])


def test_compute_progress_ingest_beyond_its_size_is_cut() -> None:
    assert compute_progress({digest(1): 10}, START, [], {digest(1): 99}) == LayerProgress(10, 10, 0, 1)


def test_source_filter_omits_the_port_and_quotes_the_path() -> None:
    label = 'labels."containerd.io/distribution.source.example.com"'
    assert source_filter("example.com:5000/a.b/c") == f'{label}~="(^|,)a\\\\.b/c(,|$)"'
