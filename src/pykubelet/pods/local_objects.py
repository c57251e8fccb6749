"""The configMaps and secrets of a standalone node: those in its manifests folder, beside its pods.

They serve environments, volumes and pulls as an API server's would, and pods that use one hear of its
changes at once. `FileSource` offers the full set after every change.

- Of two with one name the first file's counts, and the other is a problem.
- One that is immutable stays as it is until its manifest is gone; a change of it is a problem. What was
  before the agent started is not remembered.
- Before the first look at the folder nothing is known, and nothing counts as missing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

from pykubelet.api.core import ConfigMap, Secret
from pykubelet.api.pod import Pod
from pykubelet.config.errors import Problem
from pykubelet.pods.object_manifests import LocalObject, title
from pykubelet.pods.objects import NoObjects, ObjectError, ObjectMissing
from pykubelet.pods.references import config_map_names, secret_names

Use = tuple[str, str, str]
"""Kind (`ConfigMap`, `Secret`), namespace and name."""


class LocalObjects(NoObjects):
    """The `PodObjects` of a node without an API server; tokens and the like are refused."""

    def __init__(self) -> None:
        self._objects: dict[Use, LocalObject] | None = None
        self._uses: dict[str, frozenset[Use]] = {}
        self._listeners: list[Callable[[str], None]] = []

    def offer(self, given: Iterable[tuple[str, LocalObject]]) -> list[Problem]:
        """Take the full set, each with its file, in order; gives the problems with some of them."""
        before = self._objects or {}
        wanted, problems = first_of_each(given)
        after, changes = with_immutable(before, wanted)
        self._objects = after
        changed = {use for use in before.keys() | after.keys() if before.get(use) != after.get(use)}
        self._tell(changed)
        return [*problems, *changes]

    def register(self, pod: Pod) -> None:
        """Note what a pod refers to, to tell it of changes."""
        namespace = pod.metadata.namespace
        self._uses[pod.uid] = frozenset(
            {("ConfigMap", namespace, name) for name in config_map_names(pod)}
            | {("Secret", namespace, name) for name in secret_names(pod)}
        )

    def unregister(self, uid: str) -> None:
        """Forget a pod."""
        self._uses.pop(uid, None)

    async def config_map(self, pod: Pod, name: str) -> ConfigMap:
        """Give a configMap of the pod's namespace; raises ObjectError, ObjectMissing when there is none."""
        found = self._get("ConfigMap", pod, name)
        assert isinstance(found, ConfigMap)
        return found

    async def secret(self, pod: Pod, name: str) -> Secret:
        """Give a secret of the pod's namespace; raises ObjectError, ObjectMissing when there is none."""
        found = self._get("Secret", pod, name)
        assert isinstance(found, Secret)
        return found

    def listen(self, listener: Callable[[str], None]) -> None:
        """Call `listener` with a pod's uid when something that it uses has changed; it must not block."""
        self._listeners.append(listener)

    def _get(self, kind: str, pod: Pod, name: str) -> LocalObject:
        if self._objects is None:
            raise ObjectError(f'{kind.lower()} "{name}" is not known yet: no manifest has been read so far')
        found = self._objects.get((kind, pod.metadata.namespace, name))
        if found is None:
            raise ObjectMissing(f'{kind.lower()} "{name}" not found')
        return found

    def _tell(self, changed: set[Use]) -> None:
        for uid in sorted(uid for uid, uses in self._uses.items() if not changed.isdisjoint(uses)):
            for listener in self._listeners:
                listener(uid)


Offered = dict[Use, tuple[str, LocalObject]]


def first_of_each(given: Iterable[tuple[str, LocalObject]]) -> tuple[Offered, list[Problem]]:
    """Keep the first of objects with one name; the others, named by their file, are problems."""
    kept: Offered = {}
    problems = []
    for origin, found in given:
        use = (type(found).__name__, found.metadata.namespace, found.metadata.name)
        if use in kept:
            where = "here" if kept[use][0] == origin else f"in {kept[use][0]}"
            problems.append(Problem(origin, f"{title(found)} is already {where}: rename one, or remove it"))
        else:
            kept[use] = origin, found
    return kept, problems


def with_immutable(
    before: Mapping[Use, LocalObject], wanted: Offered
) -> tuple[dict[Use, LocalObject], list[Problem]]:
    """Decide what each object is from now on: an immutable one stays, and its change is a problem."""
    after: dict[Use, LocalObject] = {}
    problems = []
    for use, (origin, found) in wanted.items():
        old = before.get(use)
        if old is not None and old.immutable and old != found:
            after[use] = old
            problems.append(
                Problem(
                    origin,
                    f"{title(found)} is immutable and has changed: the old one stays in use; "
                    "give the new one another name, or remove the manifest first",
                )
            )
        else:
            after[use] = found
    return after, problems
