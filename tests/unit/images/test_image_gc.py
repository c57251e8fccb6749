"""Image garbage collection: decisions, and their execution with loop time."""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from datetime import datetime
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry

from pykubelet.api.duration import Duration
from pykubelet.cri import runtime_pb2 as pb
from pykubelet.images.image_gc import (
    EVERYTHING,
    MAX_UNRESPONSIVE,
    PERIOD_SECONDS,
    DiskUsage,
    ImageGC,
    ImageGCError,
    ImageGCPolicy,
    ImageKey,
    ImageRecord,
    bytes_to_free,
    find_images_in_use,
    plan_by_age,
    plan_by_space,
    removal_order,
    update_records,
    usage_percent,
)
from pykubelet.images.metrics import ImageGCMetrics
from pykubelet.transport.errors import CriError, DeadlineExceeded, Unavailable
from pykubelet.util.text import format_size
from tests.support.image_service import FakeContainers, FakeImages, image_fs

GIB = 1024**3
MINUTE = Duration.from_seconds(60)


def record(
    name: str,
    *,
    used: float | None = None,
    detected: float = 0.0,
    size: int = 1,
    pinned: bool = False,
    in_use: bool = False,
    handler: str = "",
) -> ImageRecord:
    return ImageRecord(
        key=ImageKey(name, handler),
        names=frozenset(),
        size=size,
        pinned=pinned,
        in_use=in_use,
        first_detected=detected,
        last_used=used,
    )


def listed(name: str, size: int = 100, *, pinned: bool = False, handler: str = "") -> pb.Image:
    return pb.Image(
        id=f"sha256:{name}",
        repo_tags=[f"registry/{name}:1"],
        size=size,
        pinned=pinned,
        spec=pb.ImageSpec(runtime_handler=handler),
    )


def container(name: str, image: str, *, state: int = 1, handler: str = "", ref: str = "") -> pb.Container:
    return pb.Container(
        id=name,
        image=pb.ImageSpec(image="registry/whatever:1", runtime_handler=handler),
        image_id="" if ref else f"sha256:{image}",
        image_ref=ref or f"sha256:{image}",
        state=pb.ContainerState.Name(state),
    )


# Decisions


@pytest.mark.parametrize(
    ("records", "order"),
    [
        ([record("a", used=3), record("b", used=1), record("c", used=2)], "bca"),
        ([record("a", used=3), record("b")], "ba"),
        ([record("a", detected=2), record("b", detected=1)], "ba"),
        ([record("a", used=1, detected=2), record("b", used=1, detected=1)], "ba"),
        ([record("a", pinned=True), record("b", in_use=True), record("c")], "c"),
        ([record(""), record("b")], "b"),
        ([], ""),
    ],
    ids=["last use", "never used first", "detection", "same use", "kept", "no id", "none"],
)
def test_removal_order_candidates_least_recently_used_first(records: list[ImageRecord], order: str) -> None:
    assert [item.key.id for item in removal_order(records)] == list(order)


@pytest.mark.parametrize(
    ("item", "now", "is_old"),
    [
        (record("a", used=100), 160.0, False),
        (record("a", used=100), 160.1, True),
        (record("a", detected=100), 160.0, False),
        (record("a", detected=100), 161.0, True),
        (record("a", used=50, detected=100), 150.0, False),
    ],
)
def test_plan_by_age_grows_from_last_use_or_detection(item: ImageRecord, now: float, is_old: bool) -> None:
    assert plan_by_age([item], ImageGCPolicy(max_age=MINUTE), now) == ([item] if is_old else [])
    assert plan_by_age([item], ImageGCPolicy(), now) == []


def test_plan_by_space_minimum_age_counts_from_detection() -> None:
    images = [record("a", detected=100), record("b", detected=101), record("c", detected=10, used=129)]
    found = plan_by_space(images, ImageGCPolicy(min_age=MINUTE), 160.0)
    assert [item.key.id for item in found] == ["a", "c"]


@pytest.mark.parametrize(
    ("disk", "percent", "amount"),
    [
        (DiskUsage(1000, 151), 85, 49),
        (DiskUsage(1000, 160), 84, 0),
        (DiskUsage(1000, 159), 85, 41),
        (DiskUsage(1000, 0), 100, 200),
        (DiskUsage(1000, 1000), 0, 0),
        (DiskUsage(7, 1), 86, 0),
    ],
)
def test_bytes_to_free_high_threshold_reaches_low_one(disk: DiskUsage, percent: int, amount: int) -> None:
    assert usage_percent(disk) == percent
    assert bytes_to_free(disk, ImageGCPolicy()) == amount


@pytest.mark.parametrize(
    ("size", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1.0 KiB"),
        (1536 * 1024, "1.5 MiB"),
        (GIB, "1.0 GiB"),
        (5 * 1024 * GIB, "5.0 TiB"),
        (5000 * 1024 * GIB, "5000.0 TiB"),
    ],
)
def test_format_size_bytes_have_upstream_units(size: int, text: str) -> None:
    assert format_size(size) == text


def test_policy_high_threshold_100_and_no_maximum_age_is_disabled() -> None:
    assert not ImageGCPolicy(high_percent=100).is_enabled
    assert ImageGCPolicy(high_percent=100, max_age=MINUTE).is_enabled
    assert ImageGCPolicy(high_percent=99).is_enabled


def test_find_images_in_use_by_handler_separates_images() -> None:
    images = [listed("a", handler="x"), listed("a", handler="y"), listed("b", handler="x"), listed("c")]
    users = [container("1", "a", handler="x"), container("2", "b"), container("3", "c")]
    used = find_images_in_use(images, users, set(), by_handler=True)
    assert used == {ImageKey("sha256:a", "x"), ImageKey("sha256:b", "x"), ImageKey("sha256:c", "")}
    used = find_images_in_use(images, users, set(), by_handler=False)
    assert used == {ImageKey(f"sha256:{name}", "") for name in "abc"}


def test_find_images_in_use_old_runtime_and_volumes_match_by_reference() -> None:
    images = [listed("a"), listed("b"), listed("c"), listed("d")]
    users = [container("1", "", ref="registry/a:1"), container("2", "", ref="sha256:b")]
    used = find_images_in_use(images, users, {"sha256:c"}, by_handler=False)
    assert {key.id for key in used} == {"sha256:a", "sha256:b", "sha256:c"}


def test_update_records_changes_are_tracked() -> None:
    images = [listed("a"), listed("b")]
    used = {ImageKey("sha256:a", "")}
    first = update_records({}, images, used, 10, by_handler=False)
    assert first[ImageKey("sha256:a", "")].last_used == 10
    assert first[ImageKey("sha256:b", "")].last_used is None
    second = update_records(
        first, [*images, listed("c")], (), 20, by_handler=False, kept_names={"registry/b:1"}
    )
    assert second[ImageKey("sha256:a", "")] == replace(first[ImageKey("sha256:a", "")], in_use=False)
    assert second[ImageKey("sha256:b", "")].pinned
    assert second[ImageKey("sha256:c", "")].first_detected == 20
    third = update_records(second, [listed("c")], (), 30, by_handler=False)
    assert list(third) == [ImageKey("sha256:c", "")]
    again = update_records(third, images, (), 40, by_handler=False)
    assert again[ImageKey("sha256:a", "")].first_detected == 40


def test_update_records_without_handlers_one_record_stays_pinned() -> None:
    images = [listed("a", pinned=True, handler="x"), listed("a", handler="y")]
    [found] = update_records({}, images, (), 0, by_handler=False).values()
    assert found.pinned
    assert len(update_records({}, images, (), 0, by_handler=True)) == 2


# Execution


@dataclass
class Users:
    """The image manager's side of garbage collection."""

    reserved: set[str] = field(default_factory=set)
    finished: list[set[str]] = field(default_factory=list)

    @contextmanager
    def removing(self, image_id: str, names: Collection[str]) -> Iterator[bool]:
        yield image_id not in self.reserved

    async def images_removed(self, remaining: Collection[str], until: datetime) -> None:
        self.finished.append(set(remaining))


class Rig:
    """Garbage collection of a runtime in memory."""

    def __init__(self, policy: ImageGCPolicy | None = None, *, by_handler: bool = False) -> None:
        self.images = FakeImages()
        self.containers = FakeContainers()
        self.users = Users()
        self.registry = CollectorRegistry()
        self.disk: DiskUsage | None = DiskUsage(1000, 1000)
        self.measured: list[Path] = []
        self.kept: set[str] = set()
        self.events: list[tuple[str, str]] = []
        self.gc = ImageGC(
            self.images,
            self.containers,
            self.users,
            self._measure,
            policy or ImageGCPolicy(min_age=Duration(0)),
            lambda kind, reason, message: self.events.append((reason, message)),
            ImageGCMetrics(self.registry),
            kept_names=self._kept_names,
            by_handler=by_handler,
        )

    async def _measure(self, path: Path) -> DiskUsage | None:
        self.measured.append(path)
        return self.disk

    async def _kept_names(self) -> set[str]:
        return self.kept

    def add(self, *images: pb.Image) -> None:
        self.images.present |= {f"{image.id} {image.spec.runtime_handler}": image for image in images}

    @property
    def removed(self) -> list[str]:
        return [spec.image.removeprefix("sha256:") for spec in self.images.removed]

    def count(self, reason: str) -> float:
        found = self.registry.get_sample_value("kubelet_image_garbage_collected_total", {"reason": reason})
        return found or 0.0


@pytest.mark.looptime
async def test_collect_above_high_threshold_removes_down_to_low() -> None:
    rig = Rig()
    for name in "abcd":
        rig.add(listed(name, 100))
        await rig.gc.detect()
        await asyncio.sleep(1)
    rig.disk = DiskUsage(1000, 50)
    await rig.gc.collect()
    assert rig.removed == ["a", "b"], "150 bytes were needed"
    assert rig.measured == [Path("/images")]
    assert (rig.count("space"), rig.count("age")) == (2, 0)
    assert rig.users.finished == [{"sha256:c", "sha256:d"}]
    assert rig.events == []


@pytest.mark.looptime
async def test_collect_below_high_threshold_removes_nothing() -> None:
    rig = Rig()
    rig.add(listed("a"))
    rig.disk = DiskUsage(1000, 160)
    await rig.gc.collect()
    assert rig.removed == []
    assert rig.users.finished == []


@pytest.mark.looptime
async def test_collect_used_pinned_kept_and_reserved_images_stay() -> None:
    rig = Rig()
    names = ("running", "exited", "created", "mounted", "pinned", "sandbox", "reserved", "free")
    rig.add(*(listed(name, pinned=name == "pinned") for name in names))
    rig.containers.containers = [
        container("1", "running"),
        container("2", "exited", state=pb.CONTAINER_EXITED),
        container("3", "created", state=pb.CONTAINER_CREATED),
    ]
    rig.containers.mounts["1"] = [
        pb.Mount(image=pb.ImageSpec(image="sha256:mounted")),
        pb.Mount(host_path="/x"),
    ]
    rig.kept, rig.users.reserved = {"registry/sandbox:1"}, {"sha256:reserved"}
    await rig.gc.delete_unused_images()
    assert rig.removed == ["free"]
    rig.disk = DiskUsage(1000, 0)
    with pytest.raises(ImageGCError, match="Insufficient free disk space"):
        await rig.gc.collect()
    assert rig.removed == ["free"]


@pytest.mark.looptime
async def test_collect_insufficient_space_records_event() -> None:
    rig = Rig()
    rig.add(listed("a", 10))
    rig.disk = DiskUsage(2 * GIB, 0)
    message = (
        "Insufficient free disk space on the node's image filesystem (100% of 2.0 GiB used). "
        "Failed to free sufficient space by deleting unused images (freed 10 bytes). "
        "Investigate disk usage, as it could be used by active images, logs, volumes, or other data."
    )
    with pytest.raises(ImageGCError) as caught:
        await rig.gc.collect()
    assert str(caught.value) == message
    assert rig.events == [("FreeDiskSpaceFailed", message)]


@pytest.mark.looptime
async def test_collect_minimum_age_keeps_new_images() -> None:
    rig = Rig(ImageGCPolicy(min_age=MINUTE))
    rig.add(listed("old", 10))
    await rig.gc.detect()
    await asyncio.sleep(60)
    rig.add(listed("new", 10))
    await rig.gc.delete_unused_images()
    assert rig.removed == ["old"]
    await asyncio.sleep(60)
    await rig.gc.delete_unused_images()
    assert rig.removed == ["old", "new"]


@pytest.mark.looptime
async def test_collect_maximum_age_removes_unused_images_whatever_the_usage() -> None:
    rig = Rig(ImageGCPolicy(high_percent=100, max_age=Duration.from_seconds(600)))
    rig.add(listed("used"), listed("idle"))
    rig.containers.containers = [container("1", "used")]
    await rig.gc.collect()
    await asyncio.sleep(600)
    rig.add(listed("new"))
    await rig.gc.collect()
    assert rig.removed == []
    await asyncio.sleep(1)
    rig.containers.containers = []
    await rig.gc.collect()
    assert rig.removed == ["idle"], "used was in use a second ago, new was detected a second ago"
    await asyncio.sleep(601)
    await rig.gc.collect()
    assert sorted(rig.removed) == ["idle", "new", "used"]
    assert (rig.count("space"), rig.count("age")) == (0, 3)


@pytest.mark.looptime
async def test_collect_image_that_cannot_be_removed_does_not_stop_others() -> None:
    rig = Rig(ImageGCPolicy(min_age=Duration(0), max_age=MINUTE))
    rig.add(listed("a"), listed("b"))
    await rig.gc.collect()
    await asyncio.sleep(61)
    rig.add(listed("c"))
    for name in "ab":
        rig.images.broken_removals[f"sha256:{name}"] = CriError("RemoveImage", "Unknown", f"{name} is busy")
    rig.disk = DiskUsage(1000, 150)
    with pytest.raises(ImageGCError) as caught:
        await rig.gc.collect()
    assert str(caught.value) == (
        "wanted to free images older than 1m0s, encountered errors in image deletion: "
        "[rpc error: code = Unknown desc = a is busy, rpc error: code = Unknown desc = b is busy]"
    )
    assert rig.removed == ["c"], "which freed the 50 bytes that the threshold required"
    rig.add(listed("c"))
    del rig.images.broken_removals["sha256:a"]
    with pytest.raises(ImageGCError) as caught:
        await rig.gc.delete_unused_images()
    assert str(caught.value) == (
        f"wanted to free {EVERYTHING} bytes, but freed 200 bytes space with errors in image deletion: "
        "rpc error: code = Unknown desc = b is busy"
    )
    assert rig.removed == ["c", "a", "c"]
    assert rig.users.finished[-1] == {"sha256:b"}


@pytest.mark.looptime
async def test_delete_unused_images_many_failures_have_short_message() -> None:
    rig = Rig()
    for number in range(1000):
        rig.add(listed(f"{number}"))
        error = CriError("RemoveImage", "Unknown", f"{number} is busy")
        rig.images.broken_removals[f"sha256:{number}"] = error
    with pytest.raises(ImageGCError, match=r"995 more\]$") as caught:
        await rig.gc.delete_unused_images()
    assert len(str(caught.value)) < 600


@pytest.mark.looptime
@pytest.mark.parametrize("kind", [Unavailable, DeadlineExceeded])
async def test_collect_runtime_without_response_is_not_called_for_each_image(kind: type[CriError]) -> None:
    rig = Rig(ImageGCPolicy(min_age=Duration(0), max_age=MINUTE))
    rig.add(*(listed(f"{number}") for number in range(50)))
    await rig.gc.detect()
    await asyncio.sleep(100)
    rig.images.remove_seconds = 10
    for number in range(50):
        rig.images.broken_removals[f"sha256:{number}"] = kind("RemoveImage", kind.__name__, "no response")
    started = asyncio.get_running_loop().time()
    with pytest.raises(ImageGCError, match="wanted to free images older than 1m0s"):
        await rig.gc.collect()
    assert asyncio.get_running_loop().time() - started == pytest.approx(10 * MAX_UNRESPONSIVE, abs=1)
    assert rig.measured == []


@pytest.mark.looptime
@pytest.mark.parametrize("part", ["images", "containers", "status", "disk"])
async def test_collect_runtime_down_raises(part: str) -> None:
    rig = Rig()
    rig.add(listed("a"))
    rig.containers.containers = [container("1", "b")]
    error = Unavailable("X", "Unavailable", "connection refused")
    match part:
        case "images":
            rig.images.broken_list = error
        case "containers":
            rig.containers.broken_list = error
        case "status":
            rig.containers.broken_status = error
        case "disk":
            rig.images.fs_info = error
    with pytest.raises(ImageGCError) as caught:
        await rig.gc.collect()
    prefix = "get container status: " if part == "status" else ""
    assert str(caught.value) == f"{prefix}rpc error: code = Unavailable desc = connection refused"
    if part != "disk":
        with pytest.raises(ImageGCError, match="connection refused"):
            await rig.gc.delete_unused_images()
    assert rig.removed == []


@pytest.mark.looptime
@pytest.mark.parametrize(
    ("fs_info", "disk", "message"),
    [
        (image_fs(), None, "imageFs information is unavailable"),
        (image_fs("/gone"), None, "invalid capacity 0 on image filesystem"),
        (image_fs(""), DiskUsage(1000, 0), "invalid capacity 0 on image filesystem"),
        (image_fs("relative"), DiskUsage(1000, 0), "invalid capacity 0 on image filesystem"),
        (image_fs("/images"), DiskUsage(0, 0), "invalid capacity 0 on image filesystem"),
        (image_fs("/images"), DiskUsage(-5, 0), "invalid capacity 0 on image filesystem"),
    ],
    ids=["missing", "unknown", "empty path", "relative path", "zero", "negative"],
)
async def test_collect_unusable_image_filesystem_removes_nothing(
    fs_info: pb.ImageFsInfoResponse, disk: DiskUsage | None, message: str
) -> None:
    rig = Rig()
    rig.add(listed("a"))
    rig.images.fs_info, rig.disk = fs_info, disk
    with pytest.raises(ImageGCError) as caught:
        await rig.gc.collect()
    assert str(caught.value) == message
    invalid = [("InvalidDiskCapacity", message)] if "capacity" in message else []
    assert rig.events == invalid
    assert rig.removed == []


@pytest.mark.looptime
@pytest.mark.parametrize(("available", "removed"), [(5000, []), (-5000, ["a", "b"])])
async def test_collect_absurd_available_bytes_are_limited(available: int, removed: list[str]) -> None:
    rig = Rig()
    rig.add(*(listed(name, 100) for name in "abc"))
    rig.disk = DiskUsage(1000, available)
    await rig.gc.collect()
    assert rig.removed == removed


@pytest.mark.looptime
async def test_collect_split_disks_measures_first_image_filesystem() -> None:
    rig = Rig()
    rig.images.fs_info = image_fs("/first", "/second")
    await rig.gc.collect()
    assert rig.measured == [Path("/first")]


@pytest.mark.looptime
async def test_collect_by_handler_removes_image_of_unused_handler() -> None:
    rig = Rig(by_handler=True)
    rig.add(listed("a", handler="runc"), listed("a", handler="vm"))
    rig.containers.containers = [container("1", "a", handler="vm")]
    await rig.gc.delete_unused_images()
    [spec] = rig.images.removed
    assert (spec.image, spec.runtime_handler) == ("sha256:a", "runc")
    assert rig.users.finished == [{"sha256:a"}], "the image of the other handler remains"


@pytest.mark.looptime
async def test_collect_image_without_id_records_event() -> None:
    rig = Rig(by_handler=True)
    rig.add(pb.Image(size=1, spec=pb.ImageSpec(runtime_handler="vm")))
    await rig.gc.delete_unused_images()
    assert rig.events == [("InvalidImageID", "ImageID is not valid, skipping, image: vm")]
    assert rig.removed == []


@pytest.mark.looptime
async def test_detect_mounts_of_containers_are_queried_once() -> None:
    rig = Rig()
    rig.containers.containers = [container("1", "a"), container("2", "b")]
    await rig.gc.detect()
    await rig.gc.detect()
    assert rig.containers.statuses == ["1", "2"]
    rig.containers.containers = [container("3", "c")]
    await rig.gc.detect()
    rig.containers.containers = [container("1", "a")]
    await rig.gc.detect()
    assert rig.containers.statuses == ["1", "2", "3", "1"], "a container that is gone is forgotten"


@pytest.mark.looptime
async def test_delete_unused_images_during_collect_waits() -> None:
    rig = Rig()
    rig.add(*(listed(name) for name in "ab"))
    rig.images.remove_seconds, rig.disk = 5, DiskUsage(1000, 0)
    await asyncio.gather(rig.gc.collect(), rig.gc.delete_unused_images(), return_exceptions=True)
    assert sorted(rig.removed) == ["a", "b"]


@pytest.mark.looptime
async def test_collect_cancelled_keeps_records_of_remaining_images() -> None:
    rig = Rig()
    rig.add(*(listed(name) for name in "abc"))
    rig.images.remove_seconds = 5
    task = asyncio.create_task(rig.gc.delete_unused_images())
    await asyncio.sleep(7)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert rig.removed == ["a"]
    assert rig.users.finished == [{"sha256:b", "sha256:c"}]


async def run_for(rig: Rig, seconds: float) -> None:
    task = asyncio.create_task(rig.gc.run())
    await asyncio.sleep(seconds)
    task.cancel()
    await asyncio.wait({task})
    assert task.cancelled()


@pytest.mark.looptime
async def test_run_first_failure_is_only_logged() -> None:
    rig = Rig()
    rig.images.fs_info = error = Unavailable("ImageFsInfo", "Unavailable", "down")
    task = asyncio.create_task(rig.gc.run())
    await asyncio.sleep(1)
    assert rig.events == []
    await asyncio.sleep(PERIOD_SECONDS)
    assert rig.events == [("ImageGCFailed", "rpc error: code = Unavailable desc = down")]
    rig.images.fs_info = image_fs("/images")
    await asyncio.sleep(PERIOD_SECONDS)
    rig.images.fs_info = error
    await asyncio.sleep(PERIOD_SECONDS)
    assert len(rig.events) == 1, "a success in between makes it the first failure again"
    await asyncio.sleep(PERIOD_SECONDS)
    assert len(rig.events) == 2
    task.cancel()


@pytest.mark.looptime
async def test_run_disabled_tracks_use_and_removes_nothing() -> None:
    rig = Rig(ImageGCPolicy(high_percent=100, min_age=MINUTE))
    rig.add(listed("a"))
    rig.disk = DiskUsage(1000, 0)
    await run_for(rig, 3 * PERIOD_SECONDS)
    assert (rig.removed, rig.measured, rig.events) == ([], [], [])
    await rig.gc.delete_unused_images()
    assert rig.removed == ["a"], "it was detected at the start"
    rig.images.broken_list = Unavailable("ListImages", "Unavailable", "down")
    await run_for(rig, 3 * PERIOD_SECONDS)
    assert rig.events == []


async def test_detect_thousands_of_images_runs_in_steps() -> None:
    rig = Rig()
    rig.add(*(listed(f"{number}") for number in range(2000)))
    rig.add(*(listed(f"{number}", pinned=True, handler="x") for number in range(50)))
    rig.containers.containers = [container(f"{number}", f"{number}") for number in range(100, 500)]
    steps = 0

    async def count_steps() -> None:
        nonlocal steps
        while True:
            steps += 1
            await asyncio.sleep(0)

    counter = asyncio.create_task(count_steps())
    await rig.gc.detect()
    counter.cancel()
    assert steps >= 10, "other tasks run after each 200 images"
    await rig.gc.delete_unused_images()
    assert sorted(map(int, rig.removed)) == [*range(50, 100), *range(500, 2000)]


# Properties

IMAGES = st.lists(
    st.tuples(
        st.sampled_from(["unused", "used", "mounted", "pinned", "kept", "reserved", "broken"]),
        st.integers(0, 400),
        st.integers(0, 3),
    ),
    max_size=12,
)


@given(IMAGES, st.integers(0, 1000), st.integers(1, 100), st.integers(0, 99), st.booleans())
def test_collect_any_state_removes_only_unused_images_in_order_and_no_more_than_needed(
    images: list[tuple[str, int, int]], available: int, high: int, low: int, on_demand: bool
) -> None:
    low = min(low, high - 1)
    policy = ImageGCPolicy(high_percent=high, low_percent=low, min_age=Duration(0))

    async def check() -> None:
        rig = Rig(policy)
        last_used: dict[str, int] = {}
        sizes: dict[str, int] = {}
        for step in range(4):
            rig.containers.containers = []
            for number, (_, size, used) in enumerate(images):
                name = f"image{number}"
                if step == 0:
                    sizes[name], last_used[name] = size, used
                    rig.add(listed(name, size, pinned=images[number][0] == "pinned"))
                if used == step and step > 0:
                    rig.containers.containers.append(container(name, name))
            await rig.gc.detect()
            await asyncio.sleep(0.0001)
        kinds = {f"image{number}": kind for number, (kind, _, _) in enumerate(images)}
        rig.containers.containers = [container(name, name) for name in kinds if kinds[name] == "used"]
        rig.containers.containers.append(container("mounts", "other"))
        rig.containers.mounts["mounts"] = [
            pb.Mount(image=pb.ImageSpec(image=f"sha256:{name}")) for name in kinds if kinds[name] == "mounted"
        ]
        rig.kept = {f"registry/{name}:1" for name in kinds if kinds[name] == "kept"}
        rig.users.reserved = {f"sha256:{name}" for name in kinds if kinds[name] == "reserved"}
        for name in kinds:
            if kinds[name] == "broken":
                rig.images.broken_removals[f"sha256:{name}"] = CriError("RemoveImage", "Unknown", "busy")
        rig.disk = disk = DiskUsage(1000, available)
        with suppress(ImageGCError):
            await (rig.gc.delete_unused_images() if on_demand else rig.gc.collect())
        assert all(kinds[name] == "unused" for name in rig.removed)
        order = [last_used[name] for name in rig.removed]
        assert order == sorted(order)
        unused = [name for name in kinds if kinds[name] == "unused"]
        if on_demand:
            assert sorted(rig.removed) == sorted(unused)
            return
        needed = bytes_to_free(disk, policy)
        freed = [sizes[name] for name in rig.removed]
        assert sum(freed[:-1]) < needed or not freed, "the last removal was necessary"
        assert sum(freed) >= needed or len(freed) == len(unused)

    asyncio.run(check())
