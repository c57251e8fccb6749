"""Image manager: ensures that an image is present before a container is created from it.

`ImageManager.ensure` applies the pull policy: check, pull if required, and after a failure back off
exponentially (10 s doubling to 5 min, per pod and image). Each step is an event with upstream's message and
an entry in the pod's timeline. The caller may be cancelled at any time (its pod was deleted); pulls that
other pods wait for continue. The back-off is in memory only.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Collection, Iterator, Sequence
from contextlib import AsyncExitStack, contextmanager, suppress
from dataclasses import dataclass
from datetime import datetime
from typing import NamedTuple

from pykubelet.api.duration import Duration
from pykubelet.api.pod import Container, Pod
from pykubelet.cri import runtime_pb2 as pb
from pykubelet.images.credential_provider import ProviderPlugins
from pykubelet.images.credentials import (
    BadCredentials,
    Credentials,
    Keyring,
    PullSecret,
    Registries,
    secrets_keyring,
)
from pykubelet.images.image_reference import ImageName, InvalidImageName, parse_image_name, truncated
from pykubelet.images.metrics import ImageMetrics
from pykubelet.images.pull_manager import PullManager
from pykubelet.images.pull_progress import PullProgress
from pykubelet.images.pull_tracker import PullTracker
from pykubelet.images.puller import (
    ImageError,
    ImageReservations,
    ImageService,
    ImageStatusCache,
    PullFailed,
    PullLimits,
    PullResult,
    Pulls,
    explain,
)
from pykubelet.podconfig.pod_history import EventKind, PodHistory, field_of
from pykubelet.transport.errors import CriError
from pykubelet.util.backoff import KeyedBackoff
from pykubelet.util.singleflight import ScopeClosed
from pykubelet.util.tasks import TaskScope

_FIRST_PAUSE = 10.0
_LONGEST_PAUSE = 300.0


@dataclass(frozen=True, slots=True)
class PresentImage:
    """An image that is present on the node."""

    id: str
    """Image reference to create the container from."""
    uid: int | None
    """UID of the image's user; None when the image specifies only a name."""
    username: str


class _Failure(NamedTuple):
    time: float
    text: str


@dataclass(frozen=True, slots=True)
class _PullRequest:
    """A request of a pod for an image."""

    pod: Pod
    image: str
    name: ImageName
    policy: str
    spec: pb.ImageSpec
    sandbox: pb.PodSandboxConfig | None
    where: str

    @property
    def key(self) -> str:
        return f"{self.pod.uid}_{self.image}"

    @property
    def quoted(self) -> str:
        return _quoted(self.image)


class _IntentError(Exception):
    """A pull intent could not be written, so the image must not be pulled."""


class _Lookup:
    """The credentials of a pod for an image, looked up once and no earlier than needed."""

    def __init__(self, lookup: Callable[[], Awaitable[list[Credentials]]]) -> None:
        self._lookup = lookup
        self._found: list[Credentials] | None = None

    async def get(self) -> list[Credentials]:
        """Return the credentials in the order in which to try them. Raises BadCredentials."""
        if self._found is None:
            self._found = await self._lookup()
        return self._found


class ImageManager:
    """The image manager of one node.

    Without a `pull_manager` (feature gate KubeletEnsureSecretPulledImages off) every pod may use every image
    that is present.

    `node_credentials` is called for every pull (see `NodeCredentials.load`). `clock` returns seconds for the
    back-off; the default is the event loop's clock.
    """

    def __init__(
        self,
        service: ImageService,
        journal: PodHistory,
        tasks: TaskScope,
        *,
        limits: PullLimits,
        metrics: ImageMetrics,
        node_credentials: Callable[[], Awaitable[Registries]] | None = None,
        plugins: ProviderPlugins | None = None,
        clock: Callable[[], float] | None = None,
        pull_manager: PullManager | None = None,
        tracker: PullTracker | None = None,
    ) -> None:
        self._journal = journal
        self._metrics = metrics
        self._node_credentials = node_credentials
        self._plugins = plugins
        self._pull_manager = pull_manager
        self._clock = clock or _loop_time
        self._status_cache = ImageStatusCache(service, tasks)
        self._reservations = ImageReservations()
        self._limits = limits
        self._tracker = tracker or PullTracker(None, tasks)
        self._pulls = Pulls(service, self._status_cache, limits, tasks, self._tracker)
        self._back_off = KeyedBackoff(_FIRST_PAUSE, _LONGEST_PAUSE)
        self._failures: dict[str, _Failure] = {}

    @property
    def plugins(self) -> ProviderPlugins | None:
        """Credential providers; None if none are configured."""
        return self._plugins

    @property
    def tracker(self) -> PullTracker:
        """Pulls in progress, with listeners and waiting messages."""
        return self._tracker

    def pulls(self) -> Sequence[PullProgress]:
        """Return the pulls in progress, the oldest first; without bytes if the runtime reports none."""
        return self._tracker.pulls()

    def set_pull_limits(self, *, serialize: bool, max_parallel: int | None, qps: float, burst: int) -> None:
        """Change the limits of pulls that start afterwards."""
        self._limits.set_limits(serialize=serialize, max_parallel=max_parallel, qps=qps, burst=burst)

    async def ensure(
        self,
        pod: Pod,
        container: Container,
        sandbox: pb.PodSandboxConfig | None,
        secrets: Sequence[PullSecret] = (),
        runtime_handler: str = "",
    ) -> PresentImage:
        """Ensure that the container's image is present, as its pull policy requires. Raises ImageError."""
        return await self.ensure_image(
            pod,
            container.image,
            container.image_pull_policy,
            sandbox,
            secrets,
            runtime_handler,
            where=field_of(pod, container.name),
        )

    async def ensure_image(
        self,
        pod: Pod,
        image: str,
        policy: str,
        sandbox: pb.PodSandboxConfig | None,
        secrets: Sequence[PullSecret] = (),
        runtime_handler: str = "",
        *,
        where: str = "",
    ) -> PresentImage:
        """Ensure that an image is present, such as a volume's; `where` is the field that events name.

        Raises ImageError.
        """
        name = self._parse(pod, image, policy, where)
        spec = pb.ImageSpec(
            image=name.for_runtime, annotations=pod.metadata.annotations, runtime_handler=runtime_handler
        )
        request = _PullRequest(pod, image, name, policy, spec, sandbox, where)
        credentials = _Lookup(lambda: self._credentials(request, secrets))
        found = await self._find_present(request) if policy in ("IfNotPresent", "Never") else None
        if found is not None and not await self._must_pull(request, found, credentials):
            self._metrics.count_request(policy, True, False)
            accessible = " and can be accessed by the pod" if self._pull_manager is not None else ""
            self._record_event(
                request, "Pulled", f"Container image {request.quoted} already present on machine{accessible}"
            )
            return _present(found.id, found)
        if policy == "Never":
            # An image that the pod has no access to is reported like one that does not exist.
            self._metrics.count_request(policy, found is not None, None if found is None else True)
            message = f"Container image {request.quoted} is not present with pull policy of Never"
            self._record_event(request, "ErrImageNeverPull", message, "Warning")
            raise ImageError("ErrImageNeverPull", message)
        self._metrics.count_request(policy, found is not None if policy == "IfNotPresent" else None, True)
        return await self._pull(request, credentials, found)

    def forget_pod(self, uid: str) -> None:
        """Forget the back-off of a pod that has been removed."""
        for key in [key for key in self._failures if key.startswith(f"{uid}_")]:
            del self._failures[key]
            self._back_off.forget(key)
        self._reservations.release_pod(uid)

    @contextmanager
    def removing(self, image_id: str, names: Collection[str]) -> Iterator[bool]:
        """Exclude pods from an image for its removal; yields False when a pod is about to use it."""
        with self._reservations.removing(image_id, names) as allowed:
            try:
                yield allowed
            finally:
                if allowed:
                    self._status_cache.forget()

    async def images_removed(self, remaining: Collection[str], until: datetime) -> None:
        """Delete the pulled records of removed images, and invalidate the image status cache.

        `remaining` are the ids of all images of the runtime, `until` is a time before they were listed.
        """
        self._status_cache.forget()
        if self._pull_manager is not None:
            await self._pull_manager.prune_unknown_records(remaining, until)

    def _parse(self, pod: Pod, image: str, policy: str, where: str) -> ImageName:
        try:
            return parse_image_name(image)
        except InvalidImageName as err:
            self._metrics.count_request(policy, None, None)
            message = f"Failed to apply default image tag {_quoted(truncated(image))}: {err}"
            self._journal.event(pod, "Warning", "InspectFailed", message, where)
            self._journal.note(pod.uid, "images", message)
            raise ImageError("InvalidImageName", message) from None

    async def _find_present(self, request: _PullRequest) -> pb.Image | None:
        fresh = False
        try:
            while True:
                removals = self._reservations.removals_ended
                found = await self._status_cache.find(request.spec, fresh=fresh)
                if found is None or await self._reservations.reserve(found.id, request.pod.uid, removals):
                    return found
                fresh = True
        except CriError as err:
            self._metrics.count_request(request.policy, None, None)
            raise self._inspect_failed(request, err.rpc_text) from err
        except ScopeClosed as err:
            raise ImageError("ImageInspectError", str(err)) from None

    async def _must_pull(self, request: _PullRequest, found: pb.Image, credentials: _Lookup) -> bool:
        """Return whether the pod must prove its access to an image that is present. Raises ImageError."""
        if self._pull_manager is None:
            return False
        try:
            return await self._pull_manager.must_pull(request.name, found.id, credentials.get)
        except BadCredentials as err:
            self._metrics.count_request(request.policy, True, None)
            raise self._pull_failed(request, str(err)) from err

    async def _pull(
        self, request: _PullRequest, credentials: _Lookup, before: pb.Image | None
    ) -> PresentImage:
        self._check_back_off(request)
        requested_at = _loop_time()
        self._record_event(request, "Pulling", f"Pulling image {request.quoted}")
        try:
            logins = list(dict.fromkeys(await credentials.get()))
            with self._reservations.pulling(request.name.listed_names):
                pulled = await self._pull_tracked(request, logins, before)
                reserved = await self._reservations.reserve(pulled.image_ref, request.pod.uid)
        except (PullFailed, BadCredentials) as err:
            raise self._pull_failed(request, str(err)) from err
        except _IntentError as err:
            raise ImageError("ErrImagePull", str(err)) from err
        except ScopeClosed as err:
            raise ImageError("ErrImagePull", str(err)) from None
        self._pulled(request, pulled, _loop_time() - requested_at)
        if not reserved:
            raise self._inspect_failed(request, "garbage collection removed it right after its pull")
        if pulled.image is None:
            # The image's user is unknown without its status; the next attempt finds the image present.
            raise self._inspect_failed(request, "the runtime does not know it right after its pull")
        return _present(pulled.ref, pulled.image)

    async def _pull_tracked(
        self, request: _PullRequest, credentials: list[Credentials], before: pb.Image | None
    ) -> PullResult:
        """Pull an image and record its credentials. Raises PullFailed and _IntentError."""
        # The image of a digest never changes.
        fresh = request.policy == "Always" and not request.name.digest
        if self._pull_manager is None:
            return await self._pull_once(request, credentials, fresh=fresh)
        if request.policy == "Always":
            with suppress(CriError):
                before = await self._status_cache.find(request.spec)
        async with AsyncExitStack() as stack:
            try:
                ref = before.id if before is not None else None
                tracking = self._pull_manager.track_pull(request.image, request.spec, ref)
                attempt = await stack.enter_async_context(tracking)
            except OSError as err:
                raise _IntentError(
                    f"Failed to record image pull intent for container image {request.quoted}: "
                    f"failed to record image pull intent: {err}"
                ) from err
            try:
                pulled = await self._pull_once(request, credentials, fresh=fresh)
            except PullFailed as err:
                if err.outcome_known:
                    attempt.record_failure()
                raise
            login = credentials[pulled.login] if pulled.login is not None else None
            attempt.record_success(pulled.image_ref, login)
        return pulled

    async def _pull_once(
        self, request: _PullRequest, credentials: list[Credentials], *, fresh: bool
    ) -> PullResult:
        return await self._pulls.pull(
            request.spec, credentials, request.sandbox, image=request.image, fresh=fresh
        )

    async def _credentials(self, request: _PullRequest, secrets: Sequence[PullSecret]) -> list[Credentials]:
        repository = request.name.repository
        found = list(secrets_keyring(secrets).lookup(repository))
        if self._node_credentials is not None:
            found += Keyring(await self._node_credentials()).lookup(repository)
        if self._plugins is not None:
            provider_result = await self._plugins.lookup(repository, request.pod)
            found += provider_result.credentials
            for failure in provider_result.failures:
                self._journal.note(request.pod.uid, "images", failure)
        return found

    def _check_back_off(self, request: _PullRequest) -> None:
        failure = self._failures.get(request.key)
        if failure is None:
            return
        remaining = self._back_off.remaining(request.key, failure.time, self._clock())
        if remaining > 0:
            message = f"Back-off pulling image {request.quoted}"
            self._record_event(request, "BackOff", message)
            raise ImageError("ImagePullBackOff", f"{message}: {failure.text}", retry_after=remaining)
        del self._failures[request.key]

    def _pull_failed(self, request: _PullRequest, failure: str) -> ImageError:
        self._record_event(request, "Failed", f"Failed to pull image {request.quoted}: {failure}", "Warning")
        reason, message = explain(request.image, failure)
        self._prune()
        now = self._clock()
        self._back_off.attempt(request.key, now, now)
        self._failures[request.key] = _Failure(now, f"{reason}: {message}")
        return ImageError(reason, message, retry_after=self._back_off.delay(request.key))

    def _pulled(self, request: _PullRequest, pulled: PullResult, waited: float) -> None:
        # A caller that joined a pull in progress has waited for a shorter time than the pull took.
        took = min(pulled.seconds, waited)
        size = pulled.image.size if pulled.image is not None else 0
        self._record_event(
            request,
            "Pulled",
            f"Successfully pulled image {request.quoted} in {_to_milliseconds(took)} "
            f"({_to_milliseconds(waited)} including waiting). Image size: {size} bytes.",
        )
        self._metrics.observe_pull(size, waited)
        self._prune()

    def _prune(self) -> None:
        self._back_off.prune(self._clock())
        self._failures = {key: item for key, item in self._failures.items() if self._back_off.delay(key)}

    def _inspect_failed(self, request: _PullRequest, reason: str) -> ImageError:
        message = f"Failed to inspect image {request.quoted}: {reason}"
        self._record_event(request, "InspectFailed", message, "Warning")
        return ImageError("ImageInspectError", message)

    def _record_event(
        self, request: _PullRequest, reason: str, message: str, kind: EventKind = "Normal"
    ) -> None:
        self._journal.event(request.pod, kind, reason, message, request.where)
        self._journal.note(request.pod.uid, "images", message)


def _present(ref: str, image: pb.Image) -> PresentImage:
    if image.HasField("uid"):
        return PresentImage(ref, image.uid.value, "")
    return PresentImage(ref, None if image.username else 0, image.username)


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def _to_milliseconds(seconds: float) -> Duration:
    return Duration(int(seconds * 1000) * 1_000_000)


def _loop_time() -> float:
    return asyncio.get_running_loop().time()
