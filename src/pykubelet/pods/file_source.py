"""Static pods from a file or a folder of manifests (`staticPodPath`).

Changes are heard through inotify within a tenth of a second; the periodic check
(`fileCheckFrequency`) finds what inotify cannot tell, such as a mount over the folder or a move of
a folder far above it. What is emitted is always the full set: every pod of every readable file, in
the order of the files' names.

- A path that does not exist holds no pods, and is picked up when it appears.
- A path that exists but cannot be listed says nothing: the last set stays.
- A file that was removed and is back before anybody looked is a pod that ended and begins again.
- A file that cannot be used keeps its last good pods for as long as it exists (see `folder.py`).
- Of two pods with one name, or one uid, the first file's counts and the other is a problem.

ConfigMaps and Secrets among the pods are handed on first, so that they are there when a pod starts; a
file with a Secret that others than root can read is warned of. A node of a cluster gets its objects
from the API server: there they are not used, which is said once.

Every problem is emitted with the set and logged once.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path

from pykubelet.api.duration import Duration
from pykubelet.api.pod import Pod
from pykubelet.config.errors import Problem
from pykubelet.logs import get_logger
from pykubelet.pods.folder import Look, Manifest, look
from pykubelet.pods.manifests import Contents
from pykubelet.pods.object_manifests import LOCAL_KINDS, LocalObject
from pykubelet.pods.path_watch import PathWatch, folders_around
from pykubelet.pods.static import static_contents, without_duplicates

log = get_logger(__name__)

Emit = Callable[[str, list[Pod], list[Problem]], None]
"""Takes a source's name, its full set of pods, and what is wrong with it."""

Serve = Callable[[Iterable[tuple[str, LocalObject]]], list[Problem]]
"""Takes the full set of ConfigMaps and Secrets, each with its file; gives what is wrong with them."""

_SHORTEST_PERIOD = 0.1
_LOOK_AGAIN = 0.25


class FileSource:
    """Watches a path and emits its pods, at once and after every change.

    `serve` makes ConfigMaps and Secrets of the manifests available to pods, where manifests have to do
    for an API server; `clock` gives nanoseconds since the epoch.
    """

    name = "file"

    def __init__(
        self,
        path: Path,
        period: Duration,
        node_name: str,
        emit: Emit,
        *,
        serve: Serve | None = None,
        clock: Callable[[], int] = time.time_ns,
    ) -> None:
        self._path = path
        self._period = max(period.seconds, _SHORTEST_PERIOD)
        self._node_name = node_name
        self._emit = emit
        self._serve = serve
        self._clock = clock
        self._known: dict[Path, Manifest] = {}
        self._removed: set[Path] = set()
        """Files that were removed since the last look that counted."""
        self._discarded = False
        """Whether the last look did not count."""
        self._emitted: object = None
        self._problems: frozenset[Problem] = frozenset()
        self._complaint = ""
        self._exposed: dict[Path, tuple[bytes, str]] = {}
        self._unused_told = False

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
        self._removed |= watch.take_removed()
        known = {file: manifest for file, manifest in self._known.items() if file not in self._removed}
        try:
            seen = await asyncio.to_thread(look, self._path, known, self._load, watch.being_written())
        except OSError as err:
            self._complain(f"cannot be read: {err.strerror}")
            return False
        late = watch.take_removed()
        self._discarded = not self._discarded and bool(late & (self._known.keys() | seen.manifests.keys()))
        if self._discarded:
            # It is not known whether these files were read before or after their removal.
            self._removed |= late
            return True
        self._complain("" if seen.exists else "does not exist; pods will start when it appears")
        removed = self._removed & self._known.keys()
        self._known, self._removed = seen.manifests, late
        self._warn(seen)
        if removed:
            # As if the removal had been seen by itself: a pod that is back is another run of it.
            self._report(
                Look({file: _podless(m) if file in removed else m for file, m in self._known.items()})
            )
        self._report(seen)
        return seen.unsettled

    def _report(self, seen: Look) -> None:
        content = [(manifest.contents, manifest.problems) for manifest in seen.manifests.values()]
        if content == self._emitted:
            return
        self._emitted = content
        problems = [problem for manifest in seen.manifests.values() for problem in manifest.problems]
        if self._serve is not None:
            problems += self._serve(
                (str(file), found)
                for file, manifest in seen.manifests.items()
                for found in manifest.contents.objects
            )
        pods, duplicates = without_duplicates(
            (str(file), pod) for file, manifest in seen.manifests.items() for pod in manifest.contents.pods
        )
        problems += duplicates
        self._log(problems)
        self._emit(self.name, pods, problems)

    def _load(self, data: bytes, file: Path) -> Contents:
        log.v(3).info("Reading manifest", path=file)
        return static_contents(
            data,
            source="file",
            origin=str(file),
            node_name=self._node_name,
            now=self._clock(),
            served=LOCAL_KINDS if self._serve is not None else frozenset(),
        )

    def _warn(self, seen: Look) -> None:
        """Tell of secrets that others can read, once for each file and change, and of unused objects."""
        exposed = {}
        for file, manifest in seen.manifests.items():
            if manifest.exposed and manifest.contents.has_secret:
                exposed[file] = manifest.digest, manifest.exposed
                if self._exposed.get(file) != exposed[file]:
                    log.warning(
                        "A Secret's manifest can be read by others than root",
                        path=file,
                        remedy=manifest.exposed,
                    )
            if manifest.contents.unused and not self._unused_told:
                self._unused_told = True
                log.warning(
                    "ConfigMaps and Secrets in manifests are not used on a node of a cluster: "
                    "create them through the API server",
                    path=file,
                )
        self._exposed = exposed

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


def _podless(manifest: Manifest) -> Manifest:
    return replace(manifest, contents=replace(manifest.contents, pods=()))
