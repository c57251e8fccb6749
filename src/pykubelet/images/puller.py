"""Pulling: one pull per image at a time, within the node's limits, with each login that fits.

Pods share a pull when nobody could tell the difference: the same image for the same runtime, the
same logins (a pod must not profit from another's), the same namespace (a runtime may check
signatures by namespace). The first one's sandbox stands for all of them.

Which images the runtime has, without asking it forty times for forty pods.

An answer "present" is good for a second, and questions asked at the same time share one answer.
That is safe: between the answer and the container's creation the image may vanish at any time
anyway; creation then fails, the pod is tried again more than a second later, and the runtime is
asked anew. An answer "absent" is never kept, so that a pull by somebody else is seen at once.

How many images are pulled at once, and how often.

Two limits protect a registry and the node's disk: a number of pulls under way, for which others
wait in the order of their arrival, and a rate (`registryPullQPS`, `registryBurst`), beyond which a
pull fails at once and is left to the back-off.

Why a container waits for its image, as `status.containerStatuses[].state.waiting` tells it.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, nullcontext
from dataclasses import dataclass
from typing import Literal, NamedTuple, Protocol

from pykubelet.cri import runtime_pb2 as pb
from pykubelet.images.credentials import Credentials
from pykubelet.logs import get_logger
from pykubelet.transport.errors import BadResponse, CriError
from pykubelet.util.singleflight import Singleflight
from pykubelet.util.tasks import TaskScope

log = get_logger(__name__)
KEPT_SECONDS = 1.0
_RESERVED = ("kubernetes.io", "k8s.io")


class ImageService(Protocol):
    """The part of the runtime's image service that is used here."""

    async def image_status(self, image: pb.ImageSpec, *, verbose: bool = False) -> pb.ImageStatusResponse:
        """Ask for an image."""
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
    """What decides which image a name stands for: equal selections have equal answers."""

    image: str
    runtime_handler: str
    annotations: frozenset[tuple[str, str]]

    @classmethod
    def of(cls, spec: pb.ImageSpec) -> Selection:
        """Take it from a request.

        A runtime may choose an image by a pod's annotations, but not by those of Kubernetes itself,
        which are different for each static pod.
        """
        chosen = frozenset((key, value) for key, value in spec.annotations.items() if not _is_reserved(key))
        return cls(spec.image, spec.runtime_handler, chosen)


class ImageStatusCache:
    """What is known of the runtime's images."""

    def __init__(self, service: ImageService, tasks: TaskScope) -> None:
        self._service = service
        self._calls: Singleflight[Selection, pb.Image | None] = Singleflight(tasks, "image-status")
        self._known: dict[Selection, tuple[float, pb.Image]] = {}

    async def find(self, spec: pb.ImageSpec, *, fresh: bool = False) -> pb.Image | None:
        """Give the image, or None when the runtime does not have it; raises CriError.

        `fresh` takes no answer to an earlier question.
        """
        selection = Selection.of(spec)
        asked, image = self._known.get(selection, (0.0, None))
        if image is not None and not fresh and _now() - asked < KEPT_SECONDS:
            return image
        return await self._calls.run(selection, lambda: self._ask(selection, spec), fresh=fresh)

    def forget(self) -> None:
        """Ask for every image anew: some were removed."""
        self._known.clear()

    async def _ask(self, selection: Selection, spec: pb.ImageSpec) -> pb.Image | None:
        asked = _now()
        self._known = {key: item for key, item in self._known.items() if asked - item[0] < KEPT_SECONDS}
        self._known.pop(selection, None)
        answer = await self._service.image_status(spec)
        if not answer.HasField("image"):
            return None
        self._known[selection] = (asked, answer.image)
        return answer.image


def _is_reserved(annotation: str) -> bool:
    domain = annotation.partition("/")[0]
    return any(domain == reserved or domain.endswith(f".{reserved}") for reserved in _RESERVED)


def _now() -> float:
    return asyncio.get_running_loop().time()


class PullRateExceeded(Exception):
    """More pulls were asked for than the configured rate allows."""

    def __str__(self) -> str:
        # These words are known to people and to tools.
        return "pull QPS exceeded"


class TokenBucket:
    """A rate with a burst: starts full, and gains `rate` tokens a second up to `burst`."""

    def __init__(self, rate: float, burst: int) -> None:
        self._rate = rate
        self._burst = burst
        self._tokens = float(burst)
        self._filled = -math.inf

    def take(self, now: float) -> bool:
        """Take a token if there is one; `now` in seconds of any clock that does not go back."""
        self._tokens = min(self._burst, self._tokens + (now - self._filled) * self._rate)
        self._filled = now
        if self._tokens < 1:
            return False
        self._tokens -= 1
        return True


class PullLimits:
    """The limits of one node, as its configuration has them."""

    def __init__(
        self, *, serialize: bool = True, max_parallel: int | None = None, qps: float = 5, burst: int = 10
    ) -> None:
        parallel = 1 if serialize else max_parallel or 0
        self._turns = asyncio.Semaphore(parallel) if parallel > 0 else None
        # A rate of zero means no limit, whatever the burst.
        self._bucket = TokenBucket(qps, burst) if qps > 0 else None

    @asynccontextmanager
    async def turn(self) -> AsyncIterator[None]:
        """Wait for a turn and hold it while inside; raises PullRateExceeded when it comes too soon."""
        async with self._turns or nullcontext():
            if self._bucket and not self._bucket.take(asyncio.get_running_loop().time()):
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
    """The image cannot be had now; the events about it are already recorded."""

    def __init__(self, reason: ImageReason, message: str, retry_after: float | None = None) -> None:
        super().__init__(reason, message)
        self.reason: ImageReason = reason
        self.message = message
        self.retry_after = retry_after
        """Seconds until another attempt can pull, where a back-off is in force."""

    def __str__(self) -> str:
        return f"{self.reason}: {self.message}"


_NAMED_FAILURES: dict[ImageReason, str] = {
    "RegistryUnavailable": "the registry is unavailable",
    "SignatureValidationFailed": "the signature validation failed",
}
"""What a runtime may begin its complaint with, and how people are told."""
_UNKNOWN_OUTCOMES = ("Unavailable", "Canceled", "DeadlineExceeded", "Internal", "ResourceExhausted")
"""Codes with which a call also ends when the runtime did not get to answer it."""


class PullFailed(Exception):
    """An image could not be pulled; the text is the runtime's own."""

    def __init__(self, message: str, *, outcome_known: bool = True) -> None:
        super().__init__(message)
        self.outcome_known = outcome_known
        """Whether the runtime itself reported the failure: otherwise the image may still arrive."""


@dataclass(frozen=True, slots=True)
class PullResult:
    """What a pull brought."""

    ref: str
    """The runtime's reference to the image."""
    image: pb.Image | None
    """What the runtime says of it; None when it did not answer."""
    seconds: float
    """How long it took, without waiting for a turn."""
    login: int | None
    """Index of the credentials that were accepted, None when the pull was made without any."""

    @property
    def image_ref(self) -> str:
        """The reference under which the runtime reports the image as present."""
        return self.image.id if self.image is not None else self.ref


class _Key(NamedTuple):
    selection: Selection
    namespace: str
    credentials: tuple[Credentials, ...]


class Pulls:
    """The pulls of one node."""

    def __init__(
        self, service: ImageService, presence: ImageStatusCache, limits: PullLimits, tasks: TaskScope
    ) -> None:
        self._service = service
        self._presence = presence
        self._limits = limits
        self._calls: Singleflight[_Key, PullResult] = Singleflight(tasks, "image-pull")

    async def pull(
        self,
        spec: pb.ImageSpec,
        credentials: Sequence[Credentials],
        sandbox: pb.PodSandboxConfig | None,
        *,
        fresh: bool,
    ) -> PullResult:
        """Pull an image, or wait for the same pull that is under way; raises PullFailed.

        `fresh` means that what a tag stands for now counts, so a pull that has begun is not joined.
        """
        namespace = sandbox.metadata.namespace if sandbox is not None else ""
        key = _Key(Selection.of(spec), namespace, tuple(credentials))
        return await self._calls.run(key, lambda: self._in_turn(spec, credentials, sandbox), fresh=fresh)

    async def _in_turn(
        self, spec: pb.ImageSpec, credentials: Sequence[Credentials], sandbox: pb.PodSandboxConfig | None
    ) -> PullResult:
        loop = asyncio.get_running_loop()
        try:
            async with self._limits.turn():
                started = loop.time()
                ref, login = await self._try_each(spec, credentials, sandbox)
                image = await self._inspect(spec)
                return PullResult(ref, image, loop.time() - started, login)
        except PullRateExceeded as err:
            raise PullFailed(str(err)) from None

    async def _try_each(
        self, spec: pb.ImageSpec, credentials: Sequence[Credentials], sandbox: pb.PodSandboxConfig | None
    ) -> tuple[str, int | None]:
        """Return the reference of the pulled image and the index of the credentials; raises PullFailed."""
        logins: list[tuple[int | None, pb.AuthConfig | None]] = [
            (index, login.for_runtime()) for index, login in enumerate(credentials)
        ]
        if not logins:
            log.v(3).info("Pulling image without logging in", image=spec.image)
        failures: list[CriError] = []
        for index, auth in logins or [(None, None)]:
            try:
                return await self._service.pull_image(spec, auth, sandbox), index
            except CriError as err:
                failures.append(err)
        raise PullFailed(
            joined([failure_text(err) for err in failures]),
            outcome_known=not any(err.code in _UNKNOWN_OUTCOMES for err in failures),
        )

    async def _inspect(self, spec: pb.ImageSpec) -> pb.Image | None:
        try:
            return await self._presence.find(spec, fresh=True)
        except CriError as err:
            log.error(err, "Could not inspect an image that was just pulled", image=spec.image)
            return None


def failure_text(err: CriError) -> str:
    """Give a failure as events show it; the code `Unknown` says nothing and is left out."""
    return err.message if err.code == "Unknown" or isinstance(err, BadResponse) else err.rpc_text


def joined(failures: Sequence[str]) -> str:
    """Give several failures as one, each different one once."""
    different = list(dict.fromkeys(failures))
    return different[0] if len(different) == 1 else f"[{', '.join(different)}]"


def explain(image: str, failure: str) -> tuple[ImageReason, str]:
    """Give the reason and the message of a container that waits because of a failed pull."""
    for reason, words in _NAMED_FAILURES.items():
        if failure.startswith(reason):
            return reason, f"image pull failed for {image} because {words}{failure.removeprefix(reason)}"
    return "ErrImagePull", failure
