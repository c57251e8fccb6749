"""Registry credentials by third-party code: the entry point group `pykubelet.credentials`.

An entry point is a function that is called with a repository (`registry.example.com/team/app`) before a pull
from it, and returns credentials by registry pattern, as a pull secret has them:

    def credentials(repository: str) -> Mapping[str, Credentials]: ...

The credentials are those of the node: every pod may use them. Use an exec credential provider with
`tokenAttributes` for credentials that depend on the pod. They are tried after the pod's pull secrets, the
node's files and the exec credential providers.

The function runs in a thread of its own for at most `TIMEOUT_SECONDS`, once for concurrent pulls from the
same repository; what it returns is not cached. If it raises, returns something else or takes longer, the pull
proceeds without it, and the failure is in the log and in the pod's timeline. Only the type of an exception is
logged: its text may contain secrets.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace

from pykubelet.api.pod import Pod
from pykubelet.images.credential_provider import CredentialPlugin, ProviderError
from pykubelet.images.credentials import Credentials, Registries
from pykubelet.util.entry_points import EntryPoint
from pykubelet.util.singleflight import Singleflight
from pykubelet.util.tasks import TaskScope
from pykubelet.util.third_party import (
    BoundedFunction,
    CallFailed,
    TooManyCalls,
    load_entry_points,
    require_function,
)

GROUP = "pykubelet.credentials"
TIMEOUT_SECONDS = 30.0
MAX_CALLS = 8
"""Calls of one function that may run at the same time, including those that exceeded their timeout."""
MAX_REGISTRIES = 1000
MAX_SECRET_CHARACTERS = 64 * 1024
CredentialFunction = Callable[[str], Mapping[str, Credentials]]


class PythonProvider:
    """A third-party function as a credential provider for all images."""

    def __init__(
        self, function: CredentialFunction, name: str, tasks: TaskScope, timeout: float = TIMEOUT_SECONDS
    ) -> None:
        self.name = name
        self._function = BoundedFunction(_checked(function), f"credentials-{name}", MAX_CALLS)
        self._timeout = timeout
        self._calls: Singleflight[str, Registries] = Singleflight(tasks, f"credentials-{name}")

    def is_for(self, repository: str) -> bool:
        """Return True: the function decides by the repository."""
        return True

    async def registries(self, repository: str, pod: Pod) -> tuple[Registries, None]:
        """Return the function's credentials. Raises ProviderError."""
        return await self._calls.run(repository, lambda: self._call(repository)), None

    async def _call(self, repository: str) -> Registries:
        try:
            found = await self._function.call(self._timeout, repository)
        except TimeoutError:
            raise ProviderError(f"it did not return within {self._timeout:g} s") from None
        except TooManyCalls as err:
            raise ProviderError(str(err)) from None
        except CallFailed as err:
            raise ProviderError(f"it raised {err.type_name}") from None
        if isinstance(found, str):
            raise ProviderError(found)
        return found


def _checked(function: CredentialFunction) -> Callable[[str], Registries | str]:
    """Return the function with its result as credentials of the node, or the reason why it is invalid."""

    def run(repository: str) -> Registries | str:
        found: object = function(repository)
        try:
            return _registries(found)
        except ProviderError as err:
            return str(err)

    return run


def _registries(found: object) -> Registries:
    """Return what a function returned as credentials of the node. Raises ProviderError."""
    if not isinstance(found, Mapping) or len(found) > MAX_REGISTRIES:
        raise ProviderError(f"it must return a mapping with at most {MAX_REGISTRIES} registries")
    registries: dict[str, Credentials] = {}
    for registry, credentials in found.items():
        if not isinstance(registry, str) or not isinstance(credentials, Credentials):
            raise ProviderError("it must return Credentials by registry")
        texts: tuple[object, ...] = (
            credentials.username,
            credentials.password,
            credentials.identity_token,
            credentials.email,
        )
        if not all(isinstance(text, str) and len(text) <= MAX_SECRET_CHARACTERS for text in texts):
            raise ProviderError(f"its credentials must be text of at most {MAX_SECRET_CHARACTERS} characters")
        # Only the kubelet knows which secret or service account credentials come from.
        registries[registry] = replace(credentials, source=None)
    return registries


def installed_providers(
    tasks: TaskScope, found: Iterable[EntryPoint[CredentialFunction]] | None = None
) -> list[CredentialPlugin]:
    """Return the installed functions, ordered by name; an error is logged for each that cannot be loaded."""
    return [
        PythonProvider(loaded.result, loaded.name, tasks)
        for loaded in load_entry_points(GROUP, "credential provider", found, require_function)
        if loaded.result is not None
    ]
