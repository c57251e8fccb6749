"""Static pods from a file or a folder of manifests (`staticPodPath`).

Changes are heard through inotify within a tenth of a second; the periodic check
(`fileCheckFrequency`) finds what inotify cannot tell, such as a mount over the folder or a move of
a folder far above it. What is emitted is always the full set: every pod of every readable file, in
the order of the files' names.

- A path that does not exist holds no pods, and is picked up when it appears.
- A path that exists but cannot be listed says nothing: the last set stays.
- A file that cannot be used keeps its last good pods for as long as it exists (see `folder.py`).
- Of two pods with one name, or one uid, the first file's counts and the other is a problem.

Every problem is emitted with the set and logged once.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable
from pathlib import Path

from pykubelet.api.duration import Duration
from pykubelet.api.pod import Pod
from pykubelet.config.errors import Problem
from pykubelet.logs import get_logger
from pykubelet.pods.folder import Look, Manifest, look
from pykubelet.pods.path_watch import PathWatch, folders_around
from pykubelet.pods.static import static_pods, without_duplicates

log = get_logger(__name__)

Emit = Callable[[str, list[Pod], list[Problem]], None]
"""Takes a source's name, its full set of pods, and what is wrong with it."""

_SHORTEST_PERIOD = 0.1
_LOOK_AGAIN = 0.25


class FileSource:
    """Watches a path and emits its pods, at once and after every change.

    `served` are the kinds of API objects that static pods may refer to on this node; `clock` gives
    nanoseconds since the epoch.
    """

    name = "file"

    def __init__(
        self,
        path: Path,
        period: Duration,
        node_name: str,
        emit: Emit,
        *,
        served: frozenset[str] = frozenset(),
        clock: Callable[[], int] = time.time_ns,
    ) -> None:
        self._path = path
        self._period = max(period.seconds, _SHORTEST_PERIOD)
        self._node_name = node_name
        self._emit = emit
        self._served = served
        self._clock = clock
        self._known: dict[Path, Manifest] = {}
        self._emitted: object = None
        self._problems: frozenset[Problem] = frozenset()
        self._complaint = ""

    async def run(self) -> None:
        """Watch until cancelled."""
        log.v(1).info("Watching path", path=self._path)
        with PathWatch() as watch:
            while True:
                watch.arm(await asyncio.to_thread(folders_around, self._path))
                unsettled = await self._look(watch)
                await watch.wait(min(self._period, _LOOK_AGAIN) if unsettled else self._period)

    async def _look(self, watch: PathWatch) -> bool:
        """Look once and emit what is new; says whether looking again soon is worth it."""
        try:
            seen = await asyncio.to_thread(look, self._path, self._known, self._load, watch.being_written())
        except OSError as err:
            self._complain(f"cannot be read: {err.strerror}")
            return False
        self._complain("" if seen.exists else "does not exist; pods will start when it appears")
        self._known = seen.manifests
        self._report(seen)
        return seen.unsettled

    def _report(self, seen: Look) -> None:
        content = [(manifest.pods, manifest.problems) for manifest in seen.manifests.values()]
        if content == self._emitted:
            return
        self._emitted = content
        pods, duplicates = without_duplicates(
            (str(file), pod) for file, manifest in seen.manifests.items() for pod in manifest.pods
        )
        problems = [problem for manifest in seen.manifests.values() for problem in manifest.problems]
        self._log([*problems, *duplicates])
        self._emit(self.name, pods, [*problems, *duplicates])

    def _load(self, data: bytes, file: Path) -> list[Pod]:
        log.v(3).info("Reading manifest", path=file)
        return static_pods(
            data,
            source="file",
            origin=str(file),
            node_name=self._node_name,
            now=self._clock(),
            served=self._served,
        )

    def _log(self, problems: Iterable[Problem]) -> None:
        problems = frozenset(problems)
        for problem in sorted(problems - self._problems):
            log.error(problem.message, "Could not use manifest", path=problem.path)
        self._problems = problems

    def _complain(self, message: str) -> None:
        if message and message != self._complaint:
            log.warning(f"The path of static pods {message}", path=self._path)
        elif self._complaint and not message:
            log.info("The path of static pods can be read now", path=self._path)
        self._complaint = message
