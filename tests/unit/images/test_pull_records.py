"""Pull intents and pulled records on disk, and the cache above them."""

import asyncio
import csv
import json
import os
import threading
from datetime import UTC, datetime
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry

from pykubelet.images.metrics import PullRecordMetrics
from pykubelet.images.pull_records import (
    MAX_RECORD_BYTES,
    ImagePullCredentials,
    ImagePulledRecord,
    PullRecordFiles,
    PullRecords,
    RecordError,
    encode_pulled,
)
from pykubelet.util.files import write_atomically

UPSTREAM = Path(__file__).parents[2] / "data" / "images" / "pull-records.tsv"
"""Files that the upstream kubelet v1.36.3 wrote."""
NOW = datetime(2026, 1, 2, 3, 4, 5, 678901, tzinfo=UTC)
IMAGE = "registry.example.com/app:1"


def upstream_files() -> list[tuple[str, str, bytes]]:
    with UPSTREAM.open(newline="") as file:
        lines = csv.reader(file, delimiter="\t", quoting=csv.QUOTE_NONE)
        next(lines)
        return [(directory, name, f"{content}\n".encode()) for directory, name, content in lines]


@pytest.fixture
def files(tmp_path: Path) -> PullRecordFiles:
    made = PullRecordFiles(tmp_path)
    made.prepare()
    return made


@pytest.fixture
def pulled_dir(tmp_path: Path) -> Path:
    return tmp_path / "image_manager" / "pulled"


@pytest.fixture
def pulling_dir(tmp_path: Path) -> Path:
    return tmp_path / "image_manager" / "pulling"


def record(image_ref: str = "sha256:a", **mapping: ImagePullCredentials) -> ImagePulledRecord:
    return ImagePulledRecord(image_ref, NOW, mapping)


def from_disk(image_ref: str) -> ImagePulledRecord:
    """A record after it was written and read: its time has whole seconds."""
    return ImagePulledRecord(image_ref, NOW.replace(microsecond=0))


def cache(
    files: PullRecordFiles, registry: CollectorRegistry, *, intents_size: int = 4, pulled_size: int = 4
) -> PullRecords:
    metrics = PullRecordMetrics(registry)
    return PullRecords(files, metrics, intents_size=intents_size, pulled_size=pulled_size)


def test_pull_record_files_of_upstream_round_trip_identically(files: PullRecordFiles, tmp_path: Path) -> None:
    expected = {}
    for directory, name, content in upstream_files():
        path = tmp_path / "image_manager" / directory / name
        path.write_bytes(content)
        expected[path] = content
    intents, intent_errors = files.list_intents()
    pulled, pulled_errors = files.list_pulled()
    assert (len(intents), len(pulled), intent_errors, pulled_errors) == (3, 5, [], [])
    for path in expected:
        path.unlink()
    for image in intents:
        files.write_intent(image)
        assert files.intent_exists(image)
    for item in pulled:
        files.write_pulled(item)
        assert files.get_pulled(item.image_ref) == item
    found = {path: path.read_bytes() for path in (tmp_path / "image_manager").glob("*/*")}
    assert found == expected
    assert {path.stat().st_mode & 0o777 for path in found} == {0o600}
    assert (tmp_path / "image_manager" / "pulled").stat().st_mode & 0o777 == 0o700


def test_pull_record_files_prepare_rewrites_v1alpha1_and_removes_temporary(
    files: PullRecordFiles, pulled_dir: Path, pulling_dir: Path
) -> None:
    originals = {}
    for directory, name, content in upstream_files():
        path = (pulled_dir if directory == "pulled" else pulling_dir) / name
        path.write_bytes(content.replace(b"/v1beta1", b"/v1alpha1"))
        originals[path] = content
    (pulled_dir / ".sha256-0.abc").write_bytes(b"{")
    foreign = pulled_dir / "notes.txt"
    foreign.write_bytes(b"x")
    files.prepare()
    assert (len(files.list_intents()[0]), len(files.list_pulled()[0])) == (3, 5)
    assert foreign.exists()
    foreign.unlink()
    now = {path: path.read_bytes() for path in (*pulled_dir.iterdir(), *pulling_dir.iterdir())}
    assert now == originals


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{",
        b'{"kind":"ImagePulledRecord","apiVersion":"kubelet.config.k8s.io/v1","imageRef":"sha256:a"}',
        b'{"kind":"ImagePullIntent","apiVersion":"kubelet.config.k8s.io/v1beta1","image":"sha256:a"}',
        b'{"kind":"ImagePulledRecord","apiVersion":"kubelet.config.k8s.io/v1beta1","imageRef":7}',
        b'{"kind":"ImagePulledRecord","apiVersion":"kubelet.config.k8s.io/v1beta1","extra":1}',
        b"[" * 100_000,
        b" " * (MAX_RECORD_BYTES + 1),
        b"\xff",
    ],
)
def test_get_pulled_unusable_file_raises_and_list_skips_it(
    files: PullRecordFiles, pulled_dir: Path, content: bytes
) -> None:
    files.write_pulled(record("sha256:a"))
    files.write_pulled(record("sha256:b"))
    broken = next(path for path in pulled_dir.iterdir() if b"sha256:a" in path.read_bytes())
    broken.write_bytes(content)
    with pytest.raises(RecordError):
        files.get_pulled("sha256:a")
    found, errors = files.list_pulled()
    assert [item.image_ref for item in found] == ["sha256:b"]
    assert len(errors) == 1
    assert broken.name in errors[0]


def test_get_pulled_file_of_other_image_returns_none(files: PullRecordFiles, pulled_dir: Path) -> None:
    files.write_pulled(record("sha256:a"))
    [path] = pulled_dir.iterdir()
    path.write_bytes(encode_pulled(record("sha256:b")))
    assert files.get_pulled("sha256:a") is None


def test_intent_exists_file_of_other_image_returns_false(files: PullRecordFiles, pulling_dir: Path) -> None:
    files.write_intent(IMAGE)
    assert files.intent_exists(IMAGE)
    [path] = pulling_dir.iterdir()
    path.write_bytes(path.read_bytes().replace(b"app:1", b"app:2"))
    assert not files.intent_exists(IMAGE)


def test_write_pulled_fails_keeps_old_content(
    files: PullRecordFiles, pulled_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files.write_pulled(record("sha256:a"))
    before = [path.read_bytes() for path in pulled_dir.iterdir()]

    def fail(handle: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(OSError, match="No space"):
        files.write_pulled(record("sha256:a", app=ImagePullCredentials(node_pods_accessible=True)))
    assert [path.read_bytes() for path in pulled_dir.iterdir()] == before


async def test_cached_all_records_fit_reads_no_disk(
    files: PullRecordFiles, registry: CollectorRegistry, monkeypatch: pytest.MonkeyPatch
) -> None:
    files.write_pulled(record("sha256:a"))
    files.write_intent(IMAGE)
    records = cache(files, registry)
    assert await records.open() == [IMAGE]

    def no_disk(*arguments: object) -> None:
        raise AssertionError("the disk was read")

    for method in ("intent_exists", "get_pulled", "list_intents", "list_pulled"):
        monkeypatch.setattr(files, method, no_disk)
    assert records.cached(IMAGE, "sha256:a") == (from_disk("sha256:a"), True)
    assert records.cached("other", "sha256:b") == (None, False)
    assert await records.get_pulled("sha256:b") is None
    assert not await records.intent_exists("other")


async def test_cached_record_evicted_reads_disk(files: PullRecordFiles, registry: CollectorRegistry) -> None:
    records = cache(files, registry, intents_size=2, pulled_size=2)
    await records.open()
    for number in range(3):
        await records.write_pulled(record(f"sha256:{number}"))
        await records.write_intent(f"image-{number}")
    assert records.cached("image-0", "sha256:0") is None, "the cache does not know"
    assert await records.get_pulled("sha256:0") == from_disk("sha256:0")
    assert await records.intent_exists("image-0")
    assert await records.get_pulled("sha256:9") is None


async def test_cached_intent_evicted_returns_none_for_untracked_image(
    files: PullRecordFiles, registry: CollectorRegistry
) -> None:
    records = cache(files, registry, intents_size=1)
    await records.open()
    for image in ("first", "second"):
        await records.write_intent(image)
    assert records.cached("first", "sha256:a") is None
    assert records.cached("second", "sha256:a") == (None, True)
    await records.write_pulled(record("sha256:b"))
    assert records.cached("first", "sha256:b") == (record("sha256:b"), False), "a record decides by itself"


async def test_cached_broken_file_not_authoritative_until_prune_lists_all(
    files: PullRecordFiles, pulled_dir: Path, registry: CollectorRegistry
) -> None:
    broken = pulled_dir / f"sha256-{'0' * 64}"
    broken.write_bytes(b"{")
    records = cache(files, registry)
    await records.open()
    assert records.cached("app", "sha256:b") is None
    broken.unlink()
    await records.prune_pulled([], NOW)
    assert records.cached("app", "sha256:b") == (None, False)


async def test_prune_pulled_deletes_only_old_records_of_unknown_images(
    files: PullRecordFiles, registry: CollectorRegistry
) -> None:
    records = cache(files, registry)
    await records.open()
    earlier = datetime(2026, 1, 1, tzinfo=UTC)
    await records.write_pulled(ImagePulledRecord("sha256:gone", earlier))
    await records.write_pulled(ImagePulledRecord("sha256:present", earlier))
    await records.write_pulled(ImagePulledRecord("sha256:new", NOW))
    # The file has whole seconds only, and must not look older than a time within the same second.
    await records.prune_pulled(["sha256:present"], NOW.replace(microsecond=1))
    assert {item.image_ref for item in files.list_pulled()[0]} == {"sha256:present", "sha256:new"}
    assert records.cached("x", "sha256:gone") == (None, False)
    assert registry.get_sample_value("kubelet_imagemanager_ondisk_pulledrecords") == 2


async def test_pull_record_metrics_follow_disk_and_cache(
    files: PullRecordFiles, registry: CollectorRegistry
) -> None:
    files.write_pulled(record("sha256:before"))
    records = cache(files, registry, intents_size=2, pulled_size=10)

    def values() -> list[float | None]:
        names = (
            "ondisk_pullintents",
            "inmemory_pullintents_usage_percent",
            "ondisk_pulledrecords",
            "inmemory_pulledrecords_usage_percent",
        )
        return [registry.get_sample_value(f"kubelet_imagemanager_{name}") for name in names]

    assert values() == [0, 0, 0, 0]
    await records.open()
    assert values() == [0, 0, 1, 10]
    for image in ("a", "b", "c"):
        await records.write_intent(image)
    await records.write_pulled(record("sha256:a"))
    assert values() == [3, 100, 2, 20]
    await records.delete_intent("b")
    assert values() == [2, 50, 2, 20]


async def test_write_intent_caller_cancelled_reaches_disk_and_cache(
    files: PullRecordFiles, registry: CollectorRegistry, monkeypatch: pytest.MonkeyPatch
) -> None:
    records = cache(files, registry)
    await records.open()
    begun, go_on = threading.Event(), threading.Event()

    def slow(target: Path, content: bytes, mode: int = 0o644, **options: bool) -> None:
        begun.set()
        assert go_on.wait(30)
        write_atomically(target, content, mode, sync_directory=options["sync_directory"])

    monkeypatch.setattr("pykubelet.images.pull_records.write_atomically", slow)
    writing = asyncio.create_task(records.write_intent(IMAGE))
    await asyncio.to_thread(begun.wait, 30)
    writing.cancel()
    await asyncio.sleep(0)
    go_on.set()
    with pytest.raises(asyncio.CancelledError):
        await writing
    assert files.list_intents() == ([IMAGE], [])
    assert records.cached(IMAGE, "sha256:a") == (None, True)


def test_encode_pulled_sorts_images_as_upstream() -> None:
    content = encode_pulled(record("sha256:a", b=ImagePullCredentials(), a=ImagePullCredentials()))
    assert list(json.loads(content)["credentialMapping"]) == ["a", "b"]
