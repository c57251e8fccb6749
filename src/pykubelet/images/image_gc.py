"""Image garbage collection: removes unused images when the image file system is full, or when they are old.

`ImageGC` owns one usage record per image; with the feature gate RuntimeClassInImageCriApi, per image and
runtime handler. Records are in memory: after a restart every image counts as detected at the start of the
process. Every five minutes the images and containers of the runtime are listed; images that no container,
running or exited, uses are candidates, the least recently used first. The eviction manager calls
`delete_unused_images`.

Kept are pinned images, the images of `kept_names` such as the sandbox image, and images that a pod is about
to use: `ImageUsers.removing` refuses an image that a pod pulls or that was just found present for it.

A collection may be cancelled or fail at any point; the next one lists everything again.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping, Sequence, Set
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from types import MappingProxyType
from typing import Literal, NamedTuple, Protocol

from pykubelet.api.duration import Duration
from pykubelet.cri import runtime_pb2 as pb
from pykubelet.images.metrics import ImageGCMetrics
from pykubelet.images.puller import join_failures
from pykubelet.logs import get_logger
from pykubelet.tracing.span import Tracer, own_span
from pykubelet.transport.errors import CriError, DeadlineExceeded, NotFound, Unavailable
from pykubelet.util.text import format_size

log = get_logger(__name__)
PERIOD_SECONDS = 300.0
"""Seconds between two collections."""
EVERYTHING = 2**63 - 1
"""Bytes to free on demand; the largest number of upstream's type, which its error message contains."""
MAX_UNRESPONSIVE = 3
"""Consecutive removals without a response of the runtime after which a collection is aborted."""
_MAX_FAILURES = 5
"""Failed removals that an error message lists."""
_IMAGES_PER_STEP = 200
"""Images that are processed before other tasks run."""
_TWO_MINUTES = Duration.from_seconds(120)
_NO_TIME = Duration(0)


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageGCPolicy:
    """Thresholds of the image file system in percent, and ages of images."""

    high_percent: int = 85
    """Usage from which on images are removed."""
    low_percent: int = 80
    """Usage down to which images are removed."""
    min_age: Duration = _TWO_MINUTES
    """Time since its detection below which an image is kept, whatever the usage."""
    max_age: Duration = _NO_TIME
    """Time without use after which an image is removed, whatever the usage; 0 is unlimited."""

    @property
    def is_enabled(self) -> bool:
        """Whether images are removed without a request of the eviction manager."""
        return self.high_percent < 100 or self.max_age > 0


class ImageKey(NamedTuple):
    """Identity of an image; the runtime handler is empty unless images are tracked per handler."""

    id: str
    runtime_handler: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageRecord:
    """Usage of an image, as far as this process has observed it; times are those of the event loop."""

    key: ImageKey
    names: frozenset[str]
    """Tags and digests."""
    size: int
    pinned: bool
    in_use: bool
    first_detected: float
    last_used: float | None

    @property
    def idle_since(self) -> float:
        """Time of the last use; of an image that was never used, the time of its detection."""
        return self.first_detected if self.last_used is None else max(self.first_detected, self.last_used)


class DiskUsage(NamedTuple):
    """Bytes of a file system."""

    capacity: int
    available: int


@dataclass(frozen=True, slots=True)
class PruneResult:
    """Unused images that were removed on request, or would be."""

    removed: Sequence[ImageRecord]
    young: int
    """Number of unused images that are kept because they have not reached the minimum age."""
    failures: Sequence[str]


class ImageGCError(Exception):
    """Raised when images cannot be listed or removed, or when the removed ones are not enough."""


class ImageRuntime(Protocol):
    """The calls of the image service that garbage collection needs."""

    async def list_images(self) -> list[pb.Image]:
        """List all images."""
        ...

    async def remove_image(self, image: pb.ImageSpec) -> None:
        """Remove an image."""
        ...

    async def image_fs_info(self) -> pb.ImageFsInfoResponse:
        """Return the file systems of images and containers."""
        ...


_NO_RECORDS: Mapping[ImageKey, ImageRecord] = MappingProxyType({})


class ContainerRuntime(Protocol):
    """The calls of the runtime service that garbage collection needs."""

    async def list_containers(self) -> list[pb.Container]:
        """List all containers."""
        ...

    async def container_status(self, container_id: str) -> pb.ContainerStatusResponse:
        """Return the status of a container."""
        ...


class ImageUsers(Protocol):
    """The image manager, as far as garbage collection needs it."""

    def removing(self, image_id: str, names: Collection[str]) -> AbstractContextManager[bool]:
        """Exclude pods from an image for its removal; yields False when a pod is about to use it."""
        ...

    async def images_removed(self, remaining: Collection[str], until: datetime) -> None:
        """Handle the end of a collection, with the ids of all images that were listed and not removed.

        `until` is a time before the images were listed.
        """
        ...


# Decisions


def find_images_in_use(
    images: Iterable[pb.Image],
    containers: Iterable[pb.Container],
    mounted: Set[str],
    *,
    by_handler: bool,
) -> set[ImageKey]:
    """Return the images that containers use; `mounted` are the image references of their image volumes."""
    used, refs = set(), set(mounted)
    for container in containers:
        if by_handler and container.image_id and container.image.runtime_handler:
            used.add(ImageKey(container.image_id, container.image.runtime_handler))
        else:
            # Without a handler, the image of every handler may be the one in use. Runtimes older than
            # CRI v1.30 report only a reference.
            refs.add(container.image_id or container.image_ref)
    for image in images:
        if image.id in refs or refs & _names(image):
            used.add(image_key(image, by_handler=by_handler))
    return used


def update_records(
    records: Mapping[ImageKey, ImageRecord],
    images: Iterable[pb.Image],
    used: Collection[ImageKey],
    now: float,
    *,
    by_handler: bool,
    kept_names: Collection[str] = (),
    listed: Mapping[ImageKey, ImageRecord] = _NO_RECORDS,
) -> dict[ImageKey, ImageRecord]:
    """Return the new records of listed images; `listed` are those of the previous part of the list."""
    updated: dict[ImageKey, ImageRecord] = {}
    for image in images:
        key, names = image_key(image, by_handler=by_handler), _names(image)
        known, same = records.get(key), updated.get(key) or listed.get(key)
        in_use = key in used
        pinned = image.pinned or image.id in kept_names or not names.isdisjoint(kept_names)
        updated[key] = ImageRecord(
            key=key,
            # The same image for several handlers is listed several times.
            names=names | same.names if same is not None else names,
            size=image.size,
            pinned=pinned or (same is not None and same.pinned),
            in_use=in_use,
            first_detected=known.first_detected if known is not None else now,
            last_used=now if in_use else known.last_used if known is not None else None,
        )
    return updated


def removal_order(records: Iterable[ImageRecord]) -> list[ImageRecord]:
    """Return the images that may be removed, the least recently used first, then the first detected."""
    unused = [item for item in records if not item.in_use and not item.pinned and item.key.id]
    never = float("-inf")
    return sorted(
        unused,
        key=lambda item: (
            never if item.last_used is None else item.last_used,
            item.first_detected,
            item.key,
        ),
    )


def plan_by_age(candidates: Iterable[ImageRecord], policy: ImageGCPolicy, now: float) -> list[ImageRecord]:
    """Return the images that were not used for longer than the maximum age.

    An image that was never used ages from its detection, so that one pulled just now is not removed; the
    upstream kubelet removes it immediately.
    """
    if policy.max_age <= 0:
        return []
    return [item for item in candidates if now - item.idle_since > policy.max_age.seconds]


def plan_by_space(candidates: Iterable[ImageRecord], policy: ImageGCPolicy, now: float) -> list[ImageRecord]:
    """Return the images that are old enough to be removed for their space."""
    return [item for item in candidates if now - item.first_detected >= policy.min_age.seconds]


def usage_percent(disk: DiskUsage) -> int:
    """Return the usage of a file system, whose capacity is not 0, in percent, rounded up."""
    return 100 - disk.available * 100 // disk.capacity


def bytes_to_free(disk: DiskUsage, policy: ImageGCPolicy) -> int:
    """Return the bytes to free to reach the low threshold; 0 below the high threshold."""
    if usage_percent(disk) < policy.high_percent:
        return 0
    return max(disk.capacity * (100 - policy.low_percent) // 100 - disk.available, 0)


def image_key(image: pb.Image, *, by_handler: bool) -> ImageKey:
    """Return the identity of an image."""
    return ImageKey(image.id, image.spec.runtime_handler if by_handler else "")


def _names(image: pb.Image) -> frozenset[str]:
    return frozenset((*image.repo_tags, *image.repo_digests))


# Actions


@dataclass(slots=True)
class _Collection:
    """State of one collection."""

    started: datetime
    now: float
    candidates: list[ImageRecord]
    """Images that may be removed, in the order of removal."""
    removed: set[ImageKey] = field(default_factory=set)
    tried: set[ImageKey] = field(default_factory=set)
    unresponsive: int = 0
    """Consecutive removals to which the runtime did not respond."""

    @property
    def is_aborted(self) -> bool:
        return self.unresponsive >= MAX_UNRESPONSIVE


class ImageGC:
    """Image garbage collection of one node."""

    def __init__(
        self,
        images: ImageRuntime,
        containers: ContainerRuntime,
        users: ImageUsers,
        measure: Callable[[Path], Awaitable[DiskUsage | None]],
        policy: ImageGCPolicy,
        record_event: Callable[[Literal["Normal", "Warning"], str, str], None],
        metrics: ImageGCMetrics,
        *,
        kept_names: Callable[[], Awaitable[Collection[str]]],
        by_handler: bool = False,
        tracer: Tracer | None = None,
    ) -> None:
        """Initialize.

        `measure` returns the usage of the file system that contains a path, None when it is unknown.
        `record_event` records an event about the node. `kept_names` returns ids or names of images that are
        kept although the runtime does not report them as pinned, such as the sandbox image; it may raise
        CriError.
        `by_handler` is the feature gate RuntimeClassInImageCriApi.
        """
        self._images = images
        self._containers = containers
        self._users = users
        self._measure = measure
        self._policy = policy
        self._record_event = record_event
        self._metrics = metrics
        self._kept_names = kept_names
        self._by_handler = by_handler
        self._tracer = tracer
        self._records: dict[ImageKey, ImageRecord] = {}
        self._mounted: dict[str, frozenset[str]] = {}
        """Image references of the image volumes of each container, which never change."""
        self._lock = asyncio.Lock()
        self._listed_at: float | None = None
        self._is_removing = False

    @property
    def listed_at(self) -> float | None:
        """Time of the event loop at which the images of `records` were listed; None before the first list."""
        return self._listed_at

    @property
    def activity(self) -> str:
        """What the images cannot be listed during; empty while nothing is going on."""
        if self._is_removing:
            return "unused images are being removed"
        return "the runtime is listing the images" if self._lock.locked() else ""

    @property
    def policy(self) -> ImageGCPolicy:
        """Thresholds and ages of the next collection."""
        return self._policy

    def set_policy(self, policy: ImageGCPolicy) -> None:
        """Replace thresholds and ages, from the next collection on."""
        self._policy = policy

    async def run(self) -> None:
        """Track the use of images and remove them every five minutes, until cancelled.

        A single failure is only logged, repeated ones are events of the node.
        """
        was_enabled, failed = True, False
        while True:
            enabled = self._policy.is_enabled
            if was_enabled and not enabled:
                log.v(2).info(
                    "ImageGCHighThresholdPercent is set 100 and ImageMaximumGCAge is 0, Disable image GC"
                )
            was_enabled = enabled
            try:
                await (self.collect() if enabled else self.detect())
            except ImageGCError as err:
                if not enabled:
                    log.info("Failed to monitor images", err=err)
                elif failed:
                    log.error(err, "Image garbage collection failed multiple times in a row")
                    self._record_event("Warning", "ImageGCFailed", str(err))
                else:
                    log.error(err, "Image garbage collection failed once")
                failed = True
            else:
                log.v(1 if failed else 4).info("Image garbage collection succeeded")
                failed = False
            await asyncio.sleep(PERIOD_SECONDS)

    async def detect(self) -> None:
        """List the images, and record which of them are in use. Raises ImageGCError."""
        async with self._lock:
            await self._start_collection()

    async def collect(self) -> None:
        """Remove images that are too old, then as many as the thresholds require. Raises ImageGCError.

        An image that cannot be removed does not prevent the removal of others.
        """
        with own_span(self._tracer, "Images/GarbageCollect"):
            async with self._lock:
                await self._collect()

    async def _collect(self) -> None:
        collection = await self._start_collection()
        try:
            problems = await self._free_old_images(collection)
            if not collection.is_aborted:
                problems += await self._free_space(collection)
        finally:
            await self._finish(collection)
        if problems:
            raise ImageGCError(join_failures(problems))

    async def delete_unused_images(self) -> None:
        """Remove all unused images that have reached the minimum age. Raises ImageGCError."""
        log.info("Attempting to delete unused images")
        async with self._lock:
            collection = await self._start_collection()
            images = plan_by_space(collection.candidates, self._policy, collection.now)
            try:
                freed, failures = await self._remove_all(collection, images, "space")
            finally:
                await self._finish(collection)
            if failures:
                raise ImageGCError(_space_failure(EVERYTHING, freed, failures))

    @property
    def records(self) -> Collection[ImageRecord]:
        """Usage of the images, as of the last collection."""
        return self._records.values()

    @property
    def min_age(self) -> Duration:
        """Time since its detection below which an unused image is kept."""
        return self._policy.min_age

    async def prune(self, *, dry_run: bool) -> PruneResult:
        """Remove all unused images that have reached the minimum age, or only list them.

        Raises ImageGCError when images cannot be listed.
        """
        async with self._lock:
            collection = await self._start_collection()
            images = plan_by_space(collection.candidates, self._policy, collection.now)
            young = len(collection.candidates) - len(images)
            if dry_run:
                return PruneResult(images, young, ())
            log.info("Removing unused images on request", images=len(images))
            try:
                _, failures = await self._remove_all(collection, images, "space")
            finally:
                await self._finish(collection)
            removed = [image for image in images if image.key in collection.removed]
            return PruneResult(removed, young, failures)

    async def _start_collection(self) -> _Collection:
        """List images and containers, and update the records. Raises ImageGCError."""
        started, now = datetime.now(UTC), asyncio.get_running_loop().time()
        try:
            images = await self._images.list_images()
            containers = await self._containers.list_containers()
            mounted = await self._mounted_images(containers)
            kept = frozenset(await self._kept_names())
        except CriError as err:
            raise ImageGCError(err.rpc_text) from err
        updated: dict[ImageKey, ImageRecord] = {}
        for start in range(0, len(images), _IMAGES_PER_STEP):
            part = images[start : start + _IMAGES_PER_STEP]
            used = find_images_in_use(part, containers, mounted, by_handler=self._by_handler)
            updated |= update_records(
                self._records,
                part,
                used,
                now,
                by_handler=self._by_handler,
                kept_names=kept,
                listed=updated,
            )
            await asyncio.sleep(0)
        self._records, self._listed_at = updated, now
        for record in self._records.values():
            if not record.key.id:
                self._record_event(
                    "Warning",
                    "InvalidImageID",
                    f"ImageID is not valid, skipping, image: {','.join(filter(None, record.key))}",
                )
        return _Collection(started, now, removal_order(self._records.values()))

    async def _mounted_images(self, containers: Iterable[pb.Container]) -> set[str]:
        """Return the image references of all image volumes. Raises ImageGCError and CriError."""
        mounted: dict[str, frozenset[str]] = {}
        for container in containers:
            known = self._mounted.get(container.id)
            if known is None:
                try:
                    status = (await self._containers.container_status(container.id)).status
                except NotFound:
                    continue
                except CriError as err:
                    raise ImageGCError(f"get container status: {err.rpc_text}") from err
                known = frozenset(mount.image.image for mount in status.mounts if mount.image.image)
            mounted[container.id] = known
        self._mounted = mounted
        return set().union(*mounted.values())

    async def _free_old_images(self, collection: _Collection) -> list[str]:
        """Remove the images above the maximum age; return problems."""
        images = plan_by_age(collection.candidates, self._policy, collection.now)
        _, failures = await self._remove_all(collection, images, "age")
        if not failures:
            return []
        return [
            f"wanted to free images older than {self._policy.max_age}, "
            f"encountered errors in image deletion: {_summary(failures)}"
        ]

    async def _free_space(self, collection: _Collection) -> list[str]:
        """Remove images down to the low threshold if the high one is reached; return problems."""
        try:
            disk = await self._measure_disk()
        except (ImageGCError, CriError) as err:
            return [err.rpc_text if isinstance(err, CriError) else str(err)]
        percent = usage_percent(disk)
        if percent < self._policy.high_percent:
            return []
        amount = bytes_to_free(disk, self._policy)
        log.info(
            "Disk usage on image filesystem is over the high threshold, trying to free bytes down to the low "
            "threshold",
            usage=percent,
            highThreshold=self._policy.high_percent,
            amountToFree=amount,
            lowThreshold=self._policy.low_percent,
        )
        rest = [item for item in collection.candidates if item.key not in collection.tried]
        images = plan_by_space(rest, self._policy, collection.now)
        freed, failures = await self._remove_all(collection, images, "space", amount)
        if failures:
            return [_space_failure(amount, freed, failures)]
        if freed >= amount:
            return []
        message = (
            f"Insufficient free disk space on the node's image filesystem ({percent}% of "
            f"{format_size(disk.capacity)} used). Failed to free sufficient space by deleting unused images "
            f"(freed {freed} bytes). Investigate disk usage, as it could be used by active images, logs, "
            "volumes, or other data."
        )
        self._record_event("Warning", "FreeDiskSpaceFailed", message)
        return [message]

    async def _measure_disk(self) -> DiskUsage:
        """Return the usage of the image file system. Raises ImageGCError and CriError."""
        response = await self._images.image_fs_info()
        if not response.image_filesystems:
            raise ImageGCError("imageFs information is unavailable")
        path = response.image_filesystems[0].fs_id.mountpoint
        found = await self._measure(Path(path)) if path.startswith("/") else None
        if found is None or found.capacity <= 0:
            message = "invalid capacity 0 on image filesystem"
            self._record_event("Warning", "InvalidDiskCapacity", message)
            raise ImageGCError(message)
        if found.available > found.capacity:
            log.info(
                "Availability is larger than capacity", available=found.available, capacity=found.capacity
            )
        return DiskUsage(found.capacity, min(max(found.available, 0), found.capacity))

    async def _remove_all(
        self,
        collection: _Collection,
        images: Iterable[ImageRecord],
        reason: Literal["age", "space"],
        amount: int = EVERYTHING,
    ) -> tuple[int, list[str]]:
        """Remove images until `amount` bytes are free; return the bytes freed and the failures."""
        self._is_removing = True
        try:
            return await self._remove_images(collection, images, reason, amount)
        finally:
            self._is_removing = False

    async def _remove_images(
        self,
        collection: _Collection,
        images: Iterable[ImageRecord],
        reason: Literal["age", "space"],
        amount: int,
    ) -> tuple[int, list[str]]:
        freed, failures = 0, []
        for image in images:
            if freed >= amount or collection.is_aborted:
                break
            collection.tried.add(image.key)
            try:
                if not await self._remove(image):
                    continue
            except CriError as err:
                log.error(err, "Failed to remove image", imageID=image.key.id)
                is_unresponsive = isinstance(err, Unavailable | DeadlineExceeded)
                collection.unresponsive = collection.unresponsive + 1 if is_unresponsive else 0
                failures.append(err.rpc_text)
                continue
            collection.unresponsive = 0
            collection.removed.add(image.key)
            self._records.pop(image.key, None)
            self._metrics.count_removal(reason)
            freed += image.size
        return freed, failures

    async def _remove(self, image: ImageRecord) -> bool:
        """Remove an image; return False when a pod is about to use it. Raises CriError."""
        with self._users.removing(image.key.id, image.names) as allowed:
            if not allowed:
                log.v(2).info("Image is about to be used, not removing it", imageID=image.key.id)
                return False
            log.info(
                "Removing image to free bytes",
                imageID=image.key.id,
                size=image.size,
                runtimeHandler=image.key.runtime_handler,
            )
            await self._images.remove_image(
                pb.ImageSpec(image=image.key.id, runtime_handler=image.key.runtime_handler)
            )
        return True

    async def _finish(self, collection: _Collection) -> None:
        if collection.removed:
            await self._users.images_removed({key.id for key in self._records}, collection.started)


def _space_failure(amount: int, freed: int, failures: list[str]) -> str:
    return (
        f"wanted to free {amount} bytes, but freed {freed} bytes space with errors in image deletion: "
        f"{_summary(failures)}"
    )


def _summary(failures: list[str]) -> str:
    """Join failures; of many different ones only the first, because an event has a limited size."""
    different = list(dict.fromkeys(failures))
    shown = different[:_MAX_FAILURES]
    if more := len(different) - len(shown):
        shown.append(f"{more} more")
    return join_failures(shown)
