"""Chain of the admission handlers in their fixed order; the first rejection decides.

A new built-in handler is a class and a line in `make_chain`. Third-party handlers are installed as entry
points of the group `pykubelet.admission`, whose objects are called with the `AdmitHandlerDeps` and return a
`PodAdmitHandler`; they are called after the built-in ones, ordered by name, each call in a thread of its own.
A handler that raises, hangs or returns something else rejects the pod: a broken handler must not admit the
pods that it was installed to reject.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from pykubelet.admission.handler import (
    UNEXPECTED,
    AdmitHandlerDeps,
    AdmitRejection,
    AdmitResult,
    DeferredResult,
    PodAdmitAttributes,
    PodAdmitHandler,
    Preempt,
)
from pykubelet.admission.node_support import (
    AppArmor,
    DeclaredFeatures,
    OperatingSystem,
    PodLevelResources,
    SupplementalGroups,
    Sysctls,
)
from pykubelet.admission.predicates import Predicates
from pykubelet.api.pod import Pod
from pykubelet.logs import get_logger
from pykubelet.util.entry_points import EntryPoint
from pykubelet.util.third_party import (
    MESSAGE_LIMIT,
    BoundedFunction,
    CallFailed,
    TooManyCalls,
    load_entry_points,
)

log = get_logger(__name__)
GROUP = "pykubelet.admission"
TIMEOUT_SECONDS = 5.0
"""Seconds for one call of a third-party handler."""
WAIT_TIMEOUT_SECONDS = 300.0
"""Seconds that a third-party handler may defer its decision."""
MAX_CALLS = 4
"""Calls of one third-party handler that may run at the same time, including those that hang."""
REASON_LIMIT = 128
HandlerFactory = Callable[[AdmitHandlerDeps], PodAdmitHandler]


class AdmitHandlerChain:
    """A chain of admission handlers, called in order."""

    def __init__(self, handlers: Sequence[PodAdmitHandler]) -> None:
        self.handlers = tuple(handlers)

    def admit(self, attempt: PodAdmitAttributes) -> AdmitResult | DeferredResult:
        """Return the first rejection, else the pods to preempt; None to admit the pod.

        No pod is preempted for a pod that a later handler rejects. Returns `DeferredResult` when a handler
        has to be waited for before the handlers after it are called.
        """
        found = self._evaluate(attempt, {})
        if not isinstance(found, _Stop):
            return found
        return DeferredResult(
            lambda: self._finish(attempt, found), apart=found.deferred.apart, why=found.deferred.why
        )

    def _evaluate(self, attempt: PodAdmitAttributes, known: Mapping[int, AdmitResult]) -> AdmitResult | _Stop:
        """Call all handlers except those whose results are known, by index."""
        preempt: Preempt | None = None
        for index, handler in enumerate(self.handlers):
            if attempt.running and not handler.for_running:
                continue
            try:
                result = known[index] if index in known else handler.admit(attempt)
            except Exception as err:  # third-party code; a bug must not admit the pod
                return _failed(handler, attempt, err)
            match result:
                case DeferredResult():
                    return _Stop(index, result)
                case AdmitRejection():
                    return result
            preempt = preempt or result
        return preempt

    async def _finish(self, attempt: PodAdmitAttributes, stop: _Stop) -> AdmitResult:
        known: dict[int, AdmitResult] = {}
        found: AdmitResult | _Stop = stop
        while isinstance(found, _Stop):
            try:
                result = await found.deferred.result()
            except Exception as err:  # as in _ask
                return _failed(self.handlers[found.index], attempt, err)
            if not found.deferred.again:
                known[found.index] = result
            elif attempt.renew is not None:
                attempt = attempt.renew()
            found = self._evaluate(attempt, known)
        return found


@dataclass(frozen=True, slots=True)
class _Stop:
    """A handler that has to be waited for, by its index."""

    index: int
    deferred: DeferredResult


def _failed(handler: PodAdmitHandler, attempt: PodAdmitAttributes, err: Exception) -> AdmitRejection:
    name, pod = type(handler).__name__, attempt.pod
    log.exception(err, "Admission handler failed", link=name, pod=pod.full_name, podUID=pod.uid)
    return AdmitRejection(UNEXPECTED, f"{name} failed: {err}")


def make_chain(deps: AdmitHandlerDeps) -> AdmitHandlerChain:
    """Build the chain of the built-in and the installed handlers."""
    ours: list[PodAdmitHandler | None] = [
        deps.pressure,
        Sysctls(deps),
        deps.allocation,
        OperatingSystem(),
        SupplementalGroups(),
        Predicates(deps),
        AppArmor(deps),
        PodLevelResources(deps),
        DeclaredFeatures(deps),
        deps.shutdown,
    ]
    return AdmitHandlerChain([*filter(None, ours), *installed_handlers(deps)])


def installed_handlers(
    deps: AdmitHandlerDeps, found: Iterable[EntryPoint[HandlerFactory]] | None = None
) -> list[PodAdmitHandler]:
    """Return the installed third-party handlers, ordered by name.

    A handler that cannot be loaded rejects all new pods with the error: admission must not silently continue
    without a handler that an administrator has installed.
    """
    handlers: list[PodAdmitHandler] = []
    for loaded in load_entry_points(GROUP, "admission handler", found, lambda make: _build(make, deps)):
        if loaded.result is not None:
            handlers.append(ThirdPartyHandler(loaded.result, loaded.name))
        else:
            problem = f"the admission link {loaded.name} ({loaded.value}) cannot be used: {loaded.err}"
            handlers.append(_Broken(problem))
    return handlers


def _build(factory: HandlerFactory, deps: AdmitHandlerDeps) -> PodAdmitHandler:
    """Return a third-party handler. Raises TypeError for an object that is not one."""
    handler = factory(deps)
    if missing := [part for part in ("for_running", "admit") if not hasattr(handler, part)]:
        raise TypeError(f"it is no link: it has no {' and no '.join(missing)}")
    return handler


class ThirdPartyHandler:
    """A third-party handler with its limits; rejects the pod if the handler fails or exceeds them.

    `admit` runs in a thread of its own, so the result is always deferred. Pods are admitted in their order,
    and while `MAX_CALLS` calls hang, further pods are rejected without waiting.
    """

    def __init__(
        self,
        handler: PodAdmitHandler,
        name: str,
        *,
        timeout: float = TIMEOUT_SECONDS,
        wait_timeout: float = WAIT_TIMEOUT_SECONDS,
    ) -> None:
        self.handler = handler
        self.for_running = bool(handler.for_running)
        self._name = name
        self._timeout = timeout
        self._wait_timeout = wait_timeout
        self._call = BoundedFunction(self._admit, f"admission-{name}", MAX_CALLS)

    def admit(self, attempt: PodAdmitAttributes) -> DeferredResult:
        """Return the result of the handler, deferred."""
        return DeferredResult(lambda: self._result(attempt))

    async def _result(self, attempt: PodAdmitAttributes) -> AdmitResult:
        pod = attempt.pod
        try:
            return await self._evaluate(attempt)
        except TimeoutError as err:
            problem = str(err) or f"it did not return within {self._timeout:g} s"
        except (TooManyCalls, CallFailed) as err:
            problem = str(err)
        log.error(
            None,
            "Admission handler failed",
            link=self._name,
            pod=pod.full_name,
            podUID=pod.uid,
            reason=problem,
        )
        return AdmitRejection(UNEXPECTED, f"{self._name} failed: {problem}")

    async def _evaluate(self, attempt: PodAdmitAttributes) -> AdmitResult:
        """Call the handler until it decides. Raises TimeoutError, TooManyCalls and CallFailed."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + self._wait_timeout
        while True:
            result = await self._call.call(self._timeout, _snapshot(attempt))
            if not isinstance(result, DeferredResult):
                return result
            waited = await self._wait(result, deadline - loop.time())
            if not result.again:
                return waited
            attempt = attempt.renew() if attempt.renew is not None else attempt

    async def _wait(self, deferred: DeferredResult, seconds: float) -> AdmitResult:
        """Wait for a deferred result. Raises TimeoutError and CallFailed."""
        limit = asyncio.timeout(max(seconds, 0))
        task = asyncio.current_task()
        try:
            async with limit:
                # Also an awaitable that is ready without waiting must not repeat forever.
                await asyncio.sleep(0)
                found: object = await deferred.result()
            return None if deferred.again else _checked(found)
        except BaseException as err:  # third-party code; SystemExit would end the kubelet
            if limit.expired():
                raise TimeoutError(f"it did not decide within {self._wait_timeout:g} s") from None
            if isinstance(err, asyncio.CancelledError) and task is not None and task.cancelling():
                raise
            raise CallFailed(err) from None

    def _admit(self, attempt: PodAdmitAttributes) -> AdmitResult | DeferredResult:
        found: object = self.handler.admit(attempt)
        return found if isinstance(found, DeferredResult) else _checked(found)


def _checked(found: object) -> AdmitResult:
    """Return what a handler returned with texts of limited length. Raises TypeError."""
    match found:
        case None:
            return None
        case AdmitRejection(reason=str(reason), message=str(message)):
            return AdmitRejection(reason[:REASON_LIMIT], message[:MESSAGE_LIMIT])
        case Preempt(victims=[*victims], resource=str()) if all(isinstance(pod, Pod) for pod in victims):
            return found
    raise TypeError("it must return an AdmitRejection, a Preempt, a DeferredResult or None")


def _snapshot(attempt: PodAdmitAttributes) -> PodAdmitAttributes:
    """Return attributes that another thread can use: nothing in them is computed when it is read."""
    devices = attempt.devices()
    return replace(attempt, other_pods=tuple(attempt.other_pods), devices=lambda: dict(devices), renew=None)


class _Broken:
    """Placeholder for a handler that could not be loaded; rejects every pod."""

    for_running = False

    def __init__(self, problem: str) -> None:
        self._problem = problem

    def admit(self, attempt: PodAdmitAttributes) -> AdmitRejection:
        return AdmitRejection(UNEXPECTED, self._problem)
