"""Pulling: one pull per image at a time, within the node's limits, with each login that fits.

Pods share a pull when nobody could tell the difference: the same image for the same runtime, the
same logins (a pod must not profit from another's), the same namespace (a runtime may check
signatures by namespace). The first one's sandbox stands for all of them.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from pykubelet.cri import runtime_pb2 as pb
from pykubelet.cri.errors import BadResponse, CriError
from pykubelet.images.errors import ImageReason
from pykubelet.images.keyring import Credentials
from pykubelet.images.presence import ImageService, Presence, Selection
from pykubelet.images.pull_limits import PullLimits, PullRateExceeded
from pykubelet.images.shared import SharedCalls
from pykubelet.logs import get_logger
from pykubelet.tasks import TaskScope

log = get_logger(__name__)

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
class Pulled:
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
        self, service: ImageService, presence: Presence, limits: PullLimits, tasks: TaskScope
    ) -> None:
        self._service = service
        self._presence = presence
        self._limits = limits
        self._calls: SharedCalls[_Key, Pulled] = SharedCalls(tasks, "image-pull")

    async def pull(
        self,
        spec: pb.ImageSpec,
        credentials: Sequence[Credentials],
        sandbox: pb.PodSandboxConfig | None,
        *,
        fresh: bool,
    ) -> Pulled:
        """Pull an image, or wait for the same pull that is under way; raises PullFailed.

        `fresh` means that what a tag stands for now counts, so a pull that has begun is not joined.
        """
        namespace = sandbox.metadata.namespace if sandbox is not None else ""
        key = _Key(Selection.of(spec), namespace, tuple(credentials))
        return await self._calls.run(key, lambda: self._in_turn(spec, credentials, sandbox), fresh=fresh)

    async def _in_turn(
        self, spec: pb.ImageSpec, credentials: Sequence[Credentials], sandbox: pb.PodSandboxConfig | None
    ) -> Pulled:
        loop = asyncio.get_running_loop()
        try:
            async with self._limits.turn():
                started = loop.time()
                ref, login = await self._try_each(spec, credentials, sandbox)
                image = await self._inspect(spec)
                return Pulled(ref, image, loop.time() - started, login)
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
