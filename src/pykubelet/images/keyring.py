"""Which credentials fit an image: the most specific first.

Credentials are kept under a registry, perhaps with a port, a path and `*` in the host's parts
(`*.example.com:5000/team`). Several may fit, which allows for rotation: a pull tries them in order.
A secret never shows itself: the text of `Credentials` is a mask, wherever it is printed.
"""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from pykubelet.api.text import quoted
from pykubelet.cri import runtime_pb2 as pb
from pykubelet.images.names import HUB
from pykubelet.logs import get_logger

log = get_logger(__name__)

_HOST = re.compile(r"(?:\[[0-9a-fA-F:.]+\]|[^\s\[\]:%\\^`{|}\x00-\x20\x7f]*)(?::[0-9]*)?", re.ASCII)
_HUB_KEY = "index.docker.io"
"""Under which `docker login` keeps the credentials of its own registry."""


class SecretCoordinates(NamedTuple):
    """The secret that credentials come from."""

    uid: str
    namespace: str
    name: str


class ServiceAccountCoordinates(NamedTuple):
    """The service account for whose token a credential provider returned credentials."""

    uid: str
    namespace: str
    name: str


CredentialSource = SecretCoordinates | ServiceAccountCoordinates


@dataclass(frozen=True, slots=True, repr=False)
class Credentials:
    """A way to log in to a registry."""

    username: str = ""
    password: str = ""
    identity_token: str = ""
    """What some registries gave at login, in place of user and password."""
    email: str = field(default="", compare=False)
    """Part of the credentials' hash only: no registry receives it."""
    source: CredentialSource | None = field(default=None, compare=False)
    """Origin of the credentials; None when every pod of the node may use them."""

    def __repr__(self) -> str:
        return "Credentials(<masked>)"

    def for_runtime(self) -> pb.AuthConfig:
        """Give them as the runtime takes them."""
        return pb.AuthConfig(
            username=self.username, password=self.password, identity_token=self.identity_token
        )


Registries = Mapping[str, Credentials]
"""Credentials by the registry that they are for, as somebody wrote it."""


class Keyring:
    """Credentials from one or more sources of equal rank."""

    def __init__(self, *sources: Registries) -> None:
        self._credentials: dict[str, list[Credentials]] = {}
        for source in sources:
            self.add(source)

    def add(self, registries: Registries, source: CredentialSource | None = None) -> None:
        """Add credentials of a source; for the same registry, those added first are tried first."""
        for registry, credentials in registries.items():
            key = registry_key(registry)
            if key is None:
                log.error(
                    None, "Ignoring a login for something that is no registry", registry=shown(registry)
                )
            else:
                tracked = credentials if source is None else replace(credentials, source=source)
                self._credentials.setdefault(key, []).append(tracked)

    def lookup(self, repository: str) -> list[Credentials]:
        """Give what fits a repository (`docker.io/library/busybox`), the best first.

        What was kept for Docker's own registry is used for it when nothing fits better.
        """
        keys = sorted(self._credentials, reverse=True)
        found = [
            credentials
            for key in keys
            if registry_matches(key, repository)
            for credentials in self._credentials[key]
        ]
        if not found and repository.startswith(f"{HUB}/"):
            found = self._credentials.get(_HUB_KEY, [])
        return found


def shown(registry: str) -> str:
    """Give what may be shown of a registry's name: people write logins into it."""
    return quoted(registry.rpartition("@")[2])


def registry_key(registry: str) -> str | None:
    """Give the host and path that stand for a registry as somebody wrote it; None when it is none.

    `https://` is dropped, and so is the version of the registry's API, which old logins contain.
    """
    place = _split(registry.removeprefix("https://").removeprefix("http://"))
    if place is None:
        return None
    path = place.path[3:] if place.path.startswith(("/v1/", "/v2/")) else place.path
    return place.host if path == "/" else place.host + path


def registry_matches(pattern: str, repository: str) -> bool:
    """Whether a pattern such as `*.example.com:5000/team` fits a repository.

    Each part of the host is compared for itself, so `*.io` does not fit `a.b.io`. The port must be
    the same, and the pattern's path must be the beginning of the repository's.
    """
    wanted, given = _split(pattern), _split(repository)
    if wanted is None or given is None or not given.path.startswith(wanted.path):
        return False
    wanted_host, wanted_port = _split_port(wanted.host)
    given_host, given_port = _split_port(given.host)
    wanted_parts, given_parts = wanted_host.split("."), given_host.split(".")
    return (
        wanted_port == given_port
        and len(wanted_parts) == len(given_parts)
        and all(map(_part_matches, wanted_parts, given_parts))
    )


class _Place(NamedTuple):
    host: str
    """With its port."""
    path: str


def _split(text: str) -> _Place | None:
    """Take a URL without scheme apart; None when its host or port cannot be one."""
    bare = text.partition("#")[0].partition("?")[0]
    authority, slash, rest = bare.partition("/")
    host = authority.rpartition("@")[2]
    return _Place(host, slash + rest) if _HOST.fullmatch(host) else None


def _split_port(host: str) -> tuple[str, str]:
    name, colon, port = host.rpartition(":")
    return (name, port) if colon and not port.endswith("]") else (host, "")


def _part_matches(pattern: str, part: str) -> bool:
    return pattern == part or fnmatch.fnmatchcase(part, pattern)
