"""Chain of the admission handlers in their fixed order; the first rejection decides.

A new built-in handler is a class and a line in `make_chain`. Third-party handlers are installed as entry
points of the group `pykubelet.admission`, whose objects are called with the `AdmitHandlerDeps` and return a
`PodAdmitHandler`; they are called after the built-in ones, ordered by name. A handler that raises rejects the
pod: a broken handler must not admit the pods that it was installed to reject.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

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
from pykubelet.logs import get_logger
from pykubelet.util.entry_points import EntryPoint, installed

log = get_logger(__name__)
GROUP = "pykubelet.admission"
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
    return AdmitHandlerChain([*filter(None, ours), *installed_handlers(deps, installed(GROUP))])


def installed_handlers(
    deps: AdmitHandlerDeps, found: Iterable[EntryPoint[HandlerFactory]]
) -> list[PodAdmitHandler]:
    """Return the installed third-party handlers, ordered by name.

    A handler that cannot be loaded rejects all new pods with the error: admission must not silently continue
    without a handler that an administrator has installed.
    """
    handlers: list[PodAdmitHandler] = []
    for entry in sorted(found, key=lambda entry: entry.name):
        where = {"link": entry.name, "entryPoint": entry.value}
        try:
            handler = entry.load()(deps)
            if missing := [part for part in ("for_running", "admit") if not hasattr(handler, part)]:
                raise TypeError(f"{entry.value} is no link: it has no {' and no '.join(missing)}")
        except Exception as err:  # third-party code; the kubelet must start anyway
            log.error(err, "Failed to load admission handler, no pod is admitted", **where)
            handlers.append(_Broken(f"the admission link {entry.name} ({entry.value}) cannot be used: {err}"))
            continue
        log.info("Loaded admission handler", **where)
        handlers.append(handler)
    return handlers


class _Broken:
    """Placeholder for a handler that could not be loaded; rejects every pod."""

    for_running = False

    def __init__(self, problem: str) -> None:
        self._problem = problem

    def admit(self, attempt: PodAdmitAttributes) -> AdmitRejection:
        return AdmitRejection(UNEXPECTED, self._problem)
