"""Loading and calls of third-party code, bounded in time and in number.

Entry points bring code that may block, raise anything, or never return. `load_entry_points` imports them and
builds their objects, `BoundedFunction` calls a function; both use a daemon thread, so that the code cannot
block the event loop or the thread pool for longer than its timeout. A thread cannot be stopped: a call that
exceeds its timeout continues to count until it returns, and while `limit` calls run, further ones fail
immediately. So a hanging function costs at most `limit` threads, and a hanging import one.

Whatever the code raises, also `SystemExit`, becomes a `CallFailed` with a limited text, formatted in the
thread: no exception of third-party code is raised, and none of its methods called, in the event loop.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Generic, ParamSpec, TypeVar

from pykubelet.logs import get_logger
from pykubelet.util.entry_points import EntryPoint, installed
from pykubelet.util.tasks import in_own_thread, start_thread

log = get_logger(__name__)
P = ParamSpec("P")
L = TypeVar("L")
T = TypeVar("T")
LOAD_TIMEOUT_SECONDS = 30.0
"""Seconds for the import of one entry point and the construction of its object."""
MESSAGE_LIMIT = 1000
"""Characters of the text of a `CallFailed`."""


class TooManyCalls(Exception):
    """Raised while as many calls of a third-party function run as are allowed."""


class CallFailed(Exception):
    """Raised when third-party code raises; contains the type and the text of the exception."""

    def __init__(self, err: BaseException) -> None:
        self.type_name = type(err).__name__
        try:
            text = str(err)
        except BaseException:  # third-party code, too
            text = "its text cannot be formatted"
        super().__init__(f"{self.type_name}: {text}"[:MESSAGE_LIMIT])


class BoundedFunction(Generic[P, T]):
    """A third-party function that at most `limit` threads run at the same time."""

    def __init__(self, function: Callable[P, T], name: str, limit: int) -> None:
        self.name = name
        self._function = function
        self._limit = limit
        self._calls: set[object] = set()

    @property
    def running(self) -> int:
        """Number of calls that have not returned, including those that exceeded their timeout."""
        return len(self._calls)

    async def call(self, timeout: float, *args: P.args, **kwargs: P.kwargs) -> T:
        """Call the function in a thread.

        Raises TimeoutError after `timeout` seconds, TooManyCalls also if no thread can be started, and
        CallFailed if the function raises.
        """
        if len(self._calls) >= self._limit:
            raise TooManyCalls(f"{self.name}: {self._limit} calls have not returned")
        call = object()
        self._calls.add(call)

        def run() -> T:
            try:
                return self._function(*args, **kwargs)
            except BaseException as err:  # SystemExit would end the kubelet
                raise CallFailed(err) from None
            finally:
                self._calls.discard(call)  # atomic; the loop's thread only adds

        async with asyncio.timeout(timeout):
            try:
                return await in_own_thread(run, name=self.name[:15], cancel_timeout=0)
            except OSError as err:  # not of the function
                self._calls.discard(call)
                raise TooManyCalls(f"{self.name}: {err.strerror}") from err


@dataclass(frozen=True, slots=True)
class LoadedEntryPoint(Generic[T]):
    """An entry point with the object that was built from it; None if `err` has the failure."""

    name: str
    value: str
    """Module and object, as in `package.module:object`."""
    result: T | None = None
    err: Exception | None = None


def require_function(loaded: L) -> L:
    """Return what an entry point contains if it can be called. Raises TypeError."""
    if not callable(loaded):
        raise TypeError(f"{type(loaded).__name__} is not a function")
    return loaded


def load_entry_points(
    group: str,
    what: str,
    found: Iterable[EntryPoint[L]] | None,
    build: Callable[[L], T],
    *,
    timeout: float = LOAD_TIMEOUT_SECONDS,
) -> Iterator[LoadedEntryPoint[T]]:
    """Yield the entry points of a group, ordered by name and module; failures are logged and yielded.

    `found` replaces the installed ones. `build` makes the object from what the entry point contains, such as
    `require_function`. Both run in a thread without an event loop, and the caller waits for at most `timeout`
    seconds. `what` is the noun in the log. An entry point is loaded when the iterator reaches it.
    """
    entries = installed(group) if found is None else found
    for entry in sorted(entries, key=lambda entry: (entry.name, entry.value)):
        loaded = _load(entry, build, timeout)
        if loaded.err is not None:
            log.error(loaded.err, f"Failed to load {what}", name=entry.name, entryPoint=entry.value)
        else:
            log.info(f"Loaded {what}", name=entry.name, entryPoint=entry.value)
        yield loaded


def _load(entry: EntryPoint[L], build: Callable[[L], T], timeout: float) -> LoadedEntryPoint[T]:
    outcome: list[LoadedEntryPoint[T]] = []

    def run() -> None:
        try:
            outcome.append(LoadedEntryPoint(entry.name, entry.value, build(entry.load())))
        except BaseException as err:  # SystemExit would end the kubelet
            outcome.append(LoadedEntryPoint(entry.name, entry.value, err=CallFailed(err)))

    thread = threading.Thread(target=run, name=f"load-{entry.name}"[:15], daemon=True)
    try:
        start_thread(thread)
    except OSError as err:
        return LoadedEntryPoint(entry.name, entry.value, err=err)
    thread.join(timeout)
    if outcome:
        return outcome[0]
    timed_out = TimeoutError(f"it was not loaded within {timeout:g} s")
    return LoadedEntryPoint(entry.name, entry.value, err=timed_out)
