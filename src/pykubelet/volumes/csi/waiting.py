"""Pods that wait for something by name, such as a driver to register: woken when it is there."""

from __future__ import annotations

from collections.abc import Callable, Iterable


class Waiting:
    """Who waits for what; note that somebody waits first, and look then, or the news may be missed."""

    def __init__(self, wake: Callable[[str], None]) -> None:
        self._wake = wake
        self._pods: dict[str, set[str]] = {}

    def __bool__(self) -> bool:
        return bool(self._pods)

    def note(self, what: str, uid: str) -> None:
        """Take note that a pod waits."""
        self._pods.setdefault(what, set()).add(uid)

    def done(self, what: str, uid: str) -> None:
        """Take note that a pod waits no more."""
        pods = self._pods.get(what, set())
        pods.discard(uid)
        if not pods:
            self._pods.pop(what, None)

    def forget(self, uid: str) -> None:
        """Take note that a pod does not wait for anything."""
        for what in list(self._pods):
            self.done(what, uid)

    def keep(self, is_known: Callable[[str], bool]) -> None:
        """Take note that pods which are not known any more do not wait for anything."""
        for uid in set().union(*self._pods.values()):
            if not is_known(uid):
                self.forget(uid)

    def there(self, names: Iterable[str]) -> None:
        """Wake all pods that wait for one of these."""
        for what in names:
            for uid in sorted(self._pods.pop(what, ())):
                self._wake(uid)
