"""Image pulls: one pull per image at a time, within the node's limits, with each matching credential.

Pods share a pull only if it is equivalent for them: the same image and runtime handler, the same credentials
(a pod must not profit from another's), and the same namespace (a runtime may verify signatures by namespace).
The sandbox config of the first caller is used.

`ImageStatusCache` holds a positive image status for one second, and concurrent requests share one call. That
is safe: the image may disappear at any time between the check and the creation of the container anyway; the
creation then fails, and the next sync, more than a second later, queries the runtime again. A negative status
is not cached, so that a pull by another client is noticed immediately.

`PullLimits` protects the registry and the node's disk: a maximum of parallel pulls, for which others wait in
FIFO order, and a rate (`registryPullQPS`, `registryBurst`), above which a pull fails immediately and is
retried after the back-off.

`ImageReservations` keeps garbage collection from removing an image between its check or pull and the creation
of the container.

All state is in memory.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Collection, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Literal, NamedTuple, Protocol

from pykubelet.cri import runtime_pb2 as pb
from pykubelet.images.credentials import Credentials
from pykubelet.images.pull_tracker import PullTracker
from pykubelet.logs import get_logger
from pykubelet.tracing.span import child_span
from pykubelet.transport.errors import BadResponse, CriError
from pykubelet.util.rate_limiter import TokenBucket
from pykubelet.util.singleflight import Singleflight
from pykubelet.util.tasks import TaskScope

log = get_logger(__name__)
CACHE_SECONDS = 1.0
RESERVATION_SECONDS = 120.0
"""Seconds for which an image is kept for a pod that is about to create a container from it."""
_RESERVED = ("kubernetes.io", "k8s.io")


class ImageService(Protocol):
    """The calls of the runtime's image service (CRI) that pulls need."""

    async def list_images(self) -> list[pb.Image]:
        """List all images."""
        ...

    async def image_status(self, image: pb.ImageSpec, *, verbose: bool = False) -> pb.ImageStatusResponse:
        """Return the status of an image, without `image` when the runtime does not have it."""
        ...

    async def pull_image(
        self,
        image: pb.ImageSpec,
        auth: pb.AuthConfig | None = None,
        sandbox_config: pb.PodSandboxConfig | None = None,
    ) -> str:
        """Pull an image."""
        ...


class Selection(NamedTuple):
    """The parts of an image spec that select the image; equal selections refer to the same image."""

    image: str
    runtime_handler: str
    annotations: frozenset[tuple[str, str]]

    @classmethod
    def from_spec(cls, spec: pb.ImageSpec) -> Selection:
        """Return the selection of an image spec.

        A runtime may select an image by a pod's annotations, but not by those of Kubernetes itself, which
        differ between static pods.
        """
        selected = frozenset((key, value) for key, value in spec.annotations.items() if not _is_reserved(key))
        return cls(spec.image, spec.runtime_handler, selected)


class ImageStatusCache:
    """Cache of the status of images in the runtime."""

    def __init__(self, service: ImageService, tasks: TaskScope) -> None:
        self._service = service
        self._calls: Singleflight[Selection, pb.Image | None] = Singleflight(tasks, "image-status")
        self._cached: dict[Selection, tuple[float, pb.Image]] = {}
        self._invalidations = 0

    async def find(self, spec: pb.ImageSpec, *, fresh: bool = False) -> pb.Image | None:
        """Return the image, or None when the runtime does not have it. Raises CriError.

        `fresh` bypasses the cache and does not join a call that has already started.
        """
        selection = Selection.from_spec(spec)
        queried_at, image = self._cached.get(selection, (0.0, None))
        if image is not None and not fresh and _now() - queried_at < CACHE_SECONDS:
            return image
        return await self._calls.run(selection, lambda: self._query(selection, spec), fresh=fresh)

    def forget(self) -> None:
        """Invalidate the cache and the calls in flight, because images have been removed."""
        self._cached.clear()
        self._invalidations += 1

    async def _query(self, selection: Selection, spec: pb.ImageSpec) -> pb.Image | None:
        queried_at, invalidations = _now(), self._invalidations
        self._cached = {
            key: item for key, item in self._cached.items() if queried_at - item[0] < CACHE_SECONDS
        }
        self._cached.pop(selection, None)
        response = await self._service.image_status(spec)
        if not response.HasField("image"):
            return None
        if invalidations == self._invalidations:
            self._cached[selection] = (queried_at, response.image)
        return response.image


class ImageReservations:
    """Exclusion between pods that are about to use an image and its removal by garbage collection.

    A pod reserves the image that the image manager found or pulled for it for `RESERVATION_SECONDS`, in which
    its container is created. While an image is being removed, pods wait, and look for it again.
    """

    def __init__(self) -> None:
        self._expiry: dict[str, dict[str, float]] = {}
        """Ends of reservations by image id and pod."""
        self._pulling: Counter[str] = Counter()
        """Pulls in flight by image name."""
        self._removals: dict[str, asyncio.Event] = {}
        self.removals_ended = 0
        """Number of removals that have ended."""

    async def reserve(self, image_id: str, uid: str, removals_ended: int | None = None) -> bool:
        """Reserve an image for a pod; return False when it has to be looked for again.

        That is after a removal of the image, or, with the value of `removals_ended` from before the image was
        found, of any image since.
        """
        if (removal := self._removals.get(image_id)) is not None:
            await removal.wait()
            return False
        if removals_ended is not None and removals_ended != self.removals_ended:
            return False
        self._expiry.setdefault(image_id, {})[uid] = _now() + RESERVATION_SECONDS
        return True

    def release_pod(self, uid: str) -> None:
        """Release all reservations of a pod that has been removed."""
        for image_id, pods in list(self._expiry.items()):
            pods.pop(uid, None)
            if not pods:
                del self._expiry[image_id]

    @contextmanager
    def pulling(self, names: Collection[str]) -> Iterator[None]:
        """Exclude the removal of images with one of these names within the context."""
        self._pulling.update(names)
        try:
            yield
        finally:
            self._pulling.subtract(names)
            for name in names:
                if not self._pulling[name]:
                    del self._pulling[name]

    @contextmanager
    def removing(self, image_id: str, names: Collection[str]) -> Iterator[bool]:
        """Let pods wait for the end of the context; yields False when a pod has reserved the image."""
        self._expire()
        if image_id in self._expiry or image_id in self._removals or any(n in self._pulling for n in names):
            yield False
            return
        removal = self._removals[image_id] = asyncio.Event()
        try:
            yield True
        finally:
            del self._removals[image_id]
            self.removals_ended += 1
            removal.set()

    def _expire(self) -> None:
        now = _now()
        for image_id, pods in list(self._expiry.items()):
            left = {uid: expiry for uid, expiry in pods.items() if expiry > now}
            if left:
                self._expiry[image_id] = left
            else:
                del self._expiry[image_id]


def _is_reserved(annotation: str) -> bool:
    domain = annotation.partition("/")[0]
    return any(domain == reserved or domain.endswith(f".{reserved}") for reserved in _RESERVED)


def _now() -> float:
    return asyncio.get_running_loop().time()


class PullRateExceeded(Exception):
    """The configured rate of pulls is exceeded."""

    def __str__(self) -> str:
        # Upstream's text, which users and tools match.
        return "pull QPS exceeded"


class PullLimits:
    """Pull limits of one node, from its configuration."""

    def __init__(
        self, *, serialize: bool = True, max_parallel: int | None = None, qps: float = 5, burst: int = 10
    ) -> None:
        self._parallel = 1 if serialize else max_parallel or 0
        self._slots = asyncio.Semaphore(self._parallel) if self._parallel > 0 else None
        # A rate of zero means no limit, whatever the burst.
        self._bucket = TokenBucket(qps, burst)

    def set_limits(self, *, serialize: bool, max_parallel: int | None, qps: float, burst: int) -> None:
        """Change the limits of pulls that start afterwards.

        Pulls that are in progress or wait for a slot keep the slots of the previous limit.
        """
        parallel = 1 if serialize else max_parallel or 0
        if parallel != self._parallel:
            self._parallel = parallel
            self._slots = asyncio.Semaphore(parallel) if parallel > 0 else None
        self._bucket.set_rate(qps, burst)

    @asynccontextmanager
    async def slot(self) -> AsyncIterator[None]:
        """Hold a pull slot within the context, after waiting for one. Raises PullRateExceeded."""
        async with self._slots or nullcontext():
            if not self._bucket.try_acquire(asyncio.get_running_loop().time()):
                raise PullRateExceeded
            yield


ImageReason = Literal[
    "ErrImagePull",
    "ImagePullBackOff",
    "ErrImageNeverPull",
    "InvalidImageName",
    "ImageInspectError",
    "RegistryUnavailable",
    "SignatureValidationFailed",
]


class ImageError(Exception):
    """The image is not available; the events about it have been recorded."""

    def __init__(self, reason: ImageReason, message: str, retry_after: float | None = None) -> None:
        super().__init__(reason, message)
        self.reason: ImageReason = reason
        self.message = message
        self.retry_after = retry_after
        """Seconds until the next attempt, if a back-off is in effect."""

    def __str__(self) -> str:
        return f"{self.reason}: {self.message}"


_NAMED_FAILURES: dict[ImageReason, str] = {
    "RegistryUnavailable": "the registry is unavailable",
    "SignatureValidationFailed": "the signature validation failed",
}
"""Prefix of a runtime's error message, and the text that replaces it in the status."""
_UNKNOWN_OUTCOMES = ("Unavailable", "Canceled", "DeadlineExceeded", "Internal", "ResourceExhausted")
"""gRPC codes with which a call may also fail without a response of the runtime."""


class PullFailed(Exception):
    """An image could not be pulled; the text is the runtime's own."""

    def __init__(self, message: str, *, outcome_known: bool = True) -> None:
        super().__init__(message)
        self.outcome_known = outcome_known
        """Whether the runtime itself reported the failure; otherwise the image may still arrive."""


@dataclass(frozen=True, slots=True)
class PullResult:
    """Result of a successful pull."""

    ref: str
    """The runtime's reference of the image."""
    image: pb.Image | None
    """Image status after the pull; None when the runtime did not return one."""
    seconds: float
    """Duration in seconds, without the wait for a slot."""
    login: int | None
    """Index of the credentials that were accepted; None for an anonymous pull."""

    @property
    def image_ref(self) -> str:
        """Reference under which the runtime reports the image as present."""
        return self.image.id if self.image is not None else self.ref


class _Key(NamedTuple):
    selection: Selection
    namespace: str
    credentials: tuple[Credentials, ...]


class Pulls:
    """Deduplicated and limited pulls of one node."""

    def __init__(
        self,
        service: ImageService,
        presence: ImageStatusCache,
        limits: PullLimits,
        tasks: TaskScope,
        tracker: PullTracker,
    ) -> None:
        self._service = service
        self._presence = presence
        self._limits = limits
        self._tracker = tracker
        self._calls: Singleflight[_Key, PullResult] = Singleflight(tasks, "image-pull")

    async def pull(
        self,
        spec: pb.ImageSpec,
        credentials: Sequence[Credentials],
        sandbox: pb.PodSandboxConfig | None,
        *,
        image: str,
        fresh: bool,
    ) -> PullResult:
        """Pull an image, or join the same pull in progress. Raises PullFailed.

        `image` is its name as in the pod. With `fresh`, a pull that has already started is not joined,
        because a tag may have moved since.
        """
        namespace = sandbox.metadata.namespace if sandbox is not None else ""
        key = _Key(Selection.from_spec(spec), namespace, tuple(credentials))
        with child_span("pullImage", {"container.image.name": spec.image}) as span:
            result = await self._calls.run(
                key, lambda: self._pull_in_slot(image, spec, credentials, sandbox), fresh=fresh
            )
            span.set_attribute("container.image.id", result.image_ref)
            if result.image is not None:
                span.set_attribute("container.image.size", result.image.size)
            return result

    async def _pull_in_slot(
        self,
        image: str,
        spec: pb.ImageSpec,
        credentials: Sequence[Credentials],
        sandbox: pb.PodSandboxConfig | None,
    ) -> PullResult:
        loop = asyncio.get_running_loop()
        try:
            async with self._limits.slot():
                started = loop.time()
                with self._tracker.track(image):
                    ref, login = await self._try_each(spec, credentials, sandbox)
                found = await self._inspect(spec)
                return PullResult(ref, found, loop.time() - started, login)
        except PullRateExceeded as err:
            raise PullFailed(str(err)) from None

    async def _try_each(
        self, spec: pb.ImageSpec, credentials: Sequence[Credentials], sandbox: pb.PodSandboxConfig | None
    ) -> tuple[str, int | None]:
        """Return the reference of the pulled image and the index of its credentials. Raises PullFailed."""
        logins: list[tuple[int | None, pb.AuthConfig | None]] = [
            (index, login.for_runtime()) for index, login in enumerate(credentials)
        ]
        if not logins:
            log.v(3).info("Pulling image without credentials", image=spec.image)
        failures: list[CriError] = []
        for index, auth in logins or [(None, None)]:
            try:
                return await self._service.pull_image(spec, auth, sandbox), index
            except CriError as err:
                failures.append(err)
        raise PullFailed(
            join_failures([failure_text(err) for err in failures]),
            outcome_known=not any(err.code in _UNKNOWN_OUTCOMES for err in failures),
        )

    async def _inspect(self, spec: pb.ImageSpec) -> pb.Image | None:
        try:
            return await self._presence.find(spec, fresh=True)
        except CriError as err:
            log.error(err, "Failed to inspect pulled image", image=spec.image)
            return None


def failure_text(err: CriError) -> str:
    """Return the text of a failure for events; the code `Unknown` is omitted as meaningless."""
    return err.message if err.code == "Unknown" or isinstance(err, BadResponse) else err.rpc_text


def join_failures(failures: Sequence[str]) -> str:
    """Join the distinct failures to one text."""
    different = list(dict.fromkeys(failures))
    return different[0] if len(different) == 1 else f"[{', '.join(different)}]"


def explain(image: str, failure: str) -> tuple[ImageReason, str]:
    """Return the waiting reason and message of a container whose image pull failed."""
    for reason, text in _NAMED_FAILURES.items():
        if failure.startswith(reason):
            return reason, f"image pull failed for {image} because {text}{failure.removeprefix(reason)}"
    return "ErrImagePull", failure
