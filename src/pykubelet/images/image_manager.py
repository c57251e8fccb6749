"""Image manager: ensures that an image is present before a container is created from it.

`ImageManager.ensure` applies the pull policy: check, pull if required, and after a failure back off
exponentially (10 s doubling to 5 min, per pod and image). Each step is an event with upstream's message and
an entry in the pod's timeline. The caller may be cancelled at any time (its pod was deleted); pulls that
other pods wait for continue. The back-off is in memory only.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AsyncExitStack, suppress
from dataclasses import dataclass
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
from pykubelet.images.image_reference import ImageName, InvalidImageName, parse_image_name, shortened
from pykubelet.images.metrics import ImageMetrics
from pykubelet.images.pull_manager import PullManager
from pykubelet.images.puller import (
    ImageError,
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
    ) -> None:
        self._journal = journal
        self._metrics = metrics
        self._node_credentials = node_credentials
        self._plugins = plugins
        self._pull_manager = pull_manager
        self._clock = clock or _loop_time
        self._presence = ImageStatusCache(service, tasks)
        self._pulls = Pulls(service, self._presence, limits, tasks)
        self._back_off = KeyedBackoff(_FIRST_PAUSE, _LONGEST_PAUSE)
        self._failures: dict[str, _Failure] = {}

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
        want = _PullRequest(pod, image, name, policy, spec, sandbox, where)
        credentials = _Lookup(lambda: self._credentials(want, secrets))
        found = await self._look(want) if policy in ("IfNotPresent", "Never") else None
        if found is not None and not await self._must_pull(want, found, credentials):
            self._metrics.needed(policy, True, False)
            accessible = " and can be accessed by the pod" if self._pull_manager is not None else ""
            self._say(want, "Pulled", f"Container image {want.quoted} already present on machine{accessible}")
            return _present(found.id, found)
        if policy == "Never":
            # An image that the pod has no access to is reported like one that does not exist.
            self._metrics.needed(policy, found is not None, None if found is None else True)
            message = f"Container image {want.quoted} is not present with pull policy of Never"
            self._say(want, "ErrImageNeverPull", message, "Warning")
            raise ImageError("ErrImageNeverPull", message)
        self._metrics.needed(policy, found is not None if policy == "IfNotPresent" else None, True)
        return await self._pull(want, credentials, found)

    def forget_pod(self, uid: str) -> None:
        """Forget the back-off of a pod that has been removed."""
        for key in [key for key in self._failures if key.startswith(f"{uid}_")]:
            del self._failures[key]
            self._back_off.forget(key)

    def images_removed(self) -> None:
        """Invalidate the image status cache, because images have been removed."""
        self._presence.forget()

    def _parse(self, pod: Pod, image: str, policy: str, where: str) -> ImageName:
        try:
            return parse_image_name(image)
        except InvalidImageName as err:
            self._metrics.needed(policy, None, None)
            message = f"Failed to apply default image tag {_quoted(shortened(image))}: {err}"
            self._journal.event(pod, "Warning", "InspectFailed", message, where)
            self._journal.note(pod.uid, "images", message)
            raise ImageError("InvalidImageName", message) from None

    async def _look(self, want: _PullRequest) -> pb.Image | None:
        try:
            return await self._presence.find(want.spec)
        except CriError as err:
            self._metrics.needed(want.policy, None, None)
            raise self._inspect_failed(want, err.rpc_text) from err
        except ScopeClosed as err:
            raise ImageError("ImageInspectError", str(err)) from None

    async def _must_pull(self, want: _PullRequest, found: pb.Image, credentials: _Lookup) -> bool:
        """Return whether the pod must prove its access to an image that is present. Raises ImageError."""
        if self._pull_manager is None:
            return False
        try:
            return await self._pull_manager.must_pull(want.name, found.id, credentials.get)
        except BadCredentials as err:
            self._metrics.needed(want.policy, True, None)
            raise self._pull_failed(want, str(err)) from err

    async def _pull(self, want: _PullRequest, credentials: _Lookup, before: pb.Image | None) -> PresentImage:
        self._check_back_off(want)
        asked = _loop_time()
        self._say(want, "Pulling", f"Pulling image {want.quoted}")
        try:
            logins = list(dict.fromkeys(await credentials.get()))
            pulled = await self._pull_tracked(want, logins, before)
        except (PullFailed, BadCredentials) as err:
            raise self._pull_failed(want, str(err)) from err
        except _IntentError as err:
            raise ImageError("ErrImagePull", str(err)) from err
        except ScopeClosed as err:
            raise ImageError("ErrImagePull", str(err)) from None
        self._pulled(want, pulled, _loop_time() - asked)
        if pulled.image is None:
            # The image's user is unknown without its status; the next attempt finds the image present.
            raise self._inspect_failed(want, "the runtime does not know it right after its pull")
        return _present(pulled.ref, pulled.image)

    async def _pull_tracked(
        self, want: _PullRequest, credentials: list[Credentials], before: pb.Image | None
    ) -> PullResult:
        """Pull an image and record its credentials. Raises PullFailed and _IntentError."""
        # The image of a digest never changes.
        fresh = want.policy == "Always" and not want.name.digest
        if self._pull_manager is None:
            return await self._pulls.pull(want.spec, credentials, want.sandbox, fresh=fresh)
        if want.policy == "Always":
            with suppress(CriError):
                before = await self._presence.find(want.spec)
        async with AsyncExitStack() as stack:
            try:
                ref = before.id if before is not None else None
                tracking = self._pull_manager.track_pull(want.image, want.spec, ref)
                attempt = await stack.enter_async_context(tracking)
            except OSError as err:
                raise _IntentError(
                    f"Failed to record image pull intent for container image {want.quoted}: "
                    f"failed to record image pull intent: {err}"
                ) from err
            try:
                pulled = await self._pulls.pull(want.spec, credentials, want.sandbox, fresh=fresh)
            except PullFailed as err:
                if err.outcome_known:
                    attempt.record_failure()
                raise
            login = credentials[pulled.login] if pulled.login is not None else None
            attempt.record_success(pulled.image_ref, login)
        return pulled

    async def _credentials(self, want: _PullRequest, secrets: Sequence[PullSecret]) -> list[Credentials]:
        repository = want.name.repository
        found = list(secrets_keyring(secrets).lookup(repository))
        if self._node_credentials is not None:
            found += Keyring(await self._node_credentials()).lookup(repository)
        if self._plugins is not None:
            asked = await self._plugins.lookup(repository, want.pod)
            found += asked.credentials
            for failure in asked.failures:
                self._journal.note(want.pod.uid, "images", failure)
        return found

    def _check_back_off(self, want: _PullRequest) -> None:
        failure = self._failures.get(want.key)
        if failure is None:
            return
        left = self._back_off.remaining(want.key, failure.time, self._clock())
        if left > 0:
            message = f"Back-off pulling image {want.quoted}"
            self._say(want, "BackOff", message)
            raise ImageError("ImagePullBackOff", f"{message}: {failure.text}", retry_after=left)
        del self._failures[want.key]

    def _pull_failed(self, want: _PullRequest, failure: str) -> ImageError:
        self._say(want, "Failed", f"Failed to pull image {want.quoted}: {failure}", "Warning")
        reason, message = explain(want.image, failure)
        self._prune()
        now = self._clock()
        self._back_off.attempt(want.key, now, now)
        self._failures[want.key] = _Failure(now, f"{reason}: {message}")
        return ImageError(reason, message, retry_after=self._back_off.delay(want.key))

    def _pulled(self, want: _PullRequest, pulled: PullResult, waited: float) -> None:
        # A caller that joined a pull in progress has waited for a shorter time than the pull took.
        took = min(pulled.seconds, waited)
        size = pulled.image.size if pulled.image is not None else 0
        self._say(
            want,
            "Pulled",
            f"Successfully pulled image {want.quoted} in {_rounded(took)} "
            f"({_rounded(waited)} including waiting). Image size: {size} bytes.",
        )
        self._metrics.pulled(size, waited)
        self._prune()

    def _prune(self) -> None:
        self._back_off.prune(self._clock())
        self._failures = {key: item for key, item in self._failures.items() if self._back_off.delay(key)}

    def _inspect_failed(self, want: _PullRequest, why: str) -> ImageError:
        message = f"Failed to inspect image {want.quoted}: {why}"
        self._say(want, "InspectFailed", message, "Warning")
        return ImageError("ImageInspectError", message)

    def _say(self, want: _PullRequest, reason: str, message: str, kind: EventKind = "Normal") -> None:
        self._journal.event(want.pod, kind, reason, message, want.where)
        self._journal.note(want.pod.uid, "images", message)


def _present(ref: str, image: pb.Image) -> PresentImage:
    if image.HasField("uid"):
        return PresentImage(ref, image.uid.value, "")
    return PresentImage(ref, None if image.username else 0, image.username)


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def _rounded(seconds: float) -> Duration:
    return Duration(int(seconds * 1000) * 1_000_000)


def _loop_time() -> float:
    return asyncio.get_running_loop().time()
