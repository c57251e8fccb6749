"""Registry credentials: a keyring that matches them to images, pull secrets, and files of the node.

Pull secrets and node files have the formats that `docker login` writes: `config.json` with `auths`, or the
older `.dockercfg` with the registries at the top level. Neither messages nor `repr(Credentials)` contain
their content.

Credentials are stored under a registry pattern with optional port, path and `*` in the labels of the host
(`*.example.com:5000/team`). Several may match, which allows rotation: a pull tries them in order, the most
specific first.

A pull secret that cannot be retrieved is an event, not a failure: the image may be public, or another secret
may suffice. The module keeps no state: secrets and files are read for each pull.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import fnmatch
import json
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

from pykubelet.api.pod import Pod
from pykubelet.cri import runtime_pb2 as pb
from pykubelet.images.image_reference import HUB
from pykubelet.logs import get_logger
from pykubelet.objects.base import ObjectError, PodObjects
from pykubelet.podconfig.pod_history import PodHistory
from pykubelet.util.text import quoted

log = get_logger(__name__)
_HOST = re.compile(r"(?:\[[0-9a-fA-F:.]+\]|[^\s\[\]:%\\^`{|}\x00-\x20\x7f]*)(?::[0-9]*)?", re.ASCII)
_HUB_KEY = "index.docker.io"
"""Key under which `docker login` stores the credentials of Docker Hub."""


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
    """Credentials of a registry; the repr is masked."""

    username: str = ""
    password: str = ""
    identity_token: str = ""
    """Token that some registries issue at login, instead of username and password."""
    email: str = field(default="", compare=False)
    """Part of the credentials' hash only: no registry receives it."""
    source: CredentialSource | None = field(default=None, compare=False)
    """Origin of the credentials; None when every pod of the node may use them."""

    def __repr__(self) -> str:
        return "Credentials(<masked>)"

    def for_runtime(self) -> pb.AuthConfig:
        """Return them as a CRI AuthConfig."""
        return pb.AuthConfig(
            username=self.username, password=self.password, identity_token=self.identity_token
        )


Registries = Mapping[str, Credentials]
"""Credentials by registry, as written in the source."""


class Keyring:
    """Credentials from one or more sources of equal precedence."""

    def __init__(self, *sources: Registries) -> None:
        self._credentials: dict[str, list[Credentials]] = {}
        for source in sources:
            self.add(source)

    def add(self, registries: Registries, source: CredentialSource | None = None) -> None:
        """Add credentials of a source; for the same registry, those added first are tried first."""
        for registry, credentials in registries.items():
            key = registry_key(registry)
            if key is None:
                log.error(None, "Ignored credentials for invalid registry", registry=redacted(registry))
            else:
                tracked = credentials if source is None else replace(credentials, source=source)
                self._credentials.setdefault(key, []).append(tracked)

    def lookup(self, repository: str) -> list[Credentials]:
        """Return the credentials that match a repository (`docker.io/library/busybox`), the best first.

        Credentials stored under the legacy key of Docker Hub are the fallback for its repositories.
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


def redacted(registry: str) -> str:
    """Return a registry name for messages, without a `user:password@` that it may contain."""
    return quoted(registry.rpartition("@")[2])


def registry_key(registry: str) -> str | None:
    """Return the normalized host and path of a registry; None when it is not a valid registry.

    The scheme is removed, and so is the registry API version, which old login entries contain.
    """
    url = _split(registry.removeprefix("https://").removeprefix("http://"))
    if url is None:
        return None
    path = url.path[3:] if url.path.startswith(("/v1/", "/v2/")) else url.path
    return url.host if path == "/" else url.host + path


def registry_matches(pattern: str, repository: str) -> bool:
    """Return whether a pattern such as `*.example.com:5000/team` matches a repository.

    The labels of the host are compared one by one, so `*.io` does not match `a.b.io`. The port must be equal,
    and the pattern's path must be a prefix of the repository's.
    """
    pattern_url, repository_url = _split(pattern), _split(repository)
    if pattern_url is None or repository_url is None or not repository_url.path.startswith(pattern_url.path):
        return False
    pattern_host, pattern_port = _split_port(pattern_url.host)
    repository_host, repository_port = _split_port(repository_url.host)
    pattern_labels, repository_labels = pattern_host.split("."), repository_host.split(".")
    return (
        pattern_port == repository_port
        and len(pattern_labels) == len(repository_labels)
        and all(map(_label_matches, pattern_labels, repository_labels))
    )


class _RegistryUrl(NamedTuple):
    host: str
    """Host, with its port."""
    path: str


def _split(text: str) -> _RegistryUrl | None:
    """Split a URL without scheme; None when its host or port is invalid."""
    bare = text.partition("#")[0].partition("?")[0]
    authority, slash, rest = bare.partition("/")
    host = authority.rpartition("@")[2]
    return _RegistryUrl(host, slash + rest) if _HOST.fullmatch(host) else None


def _split_port(host: str) -> tuple[str, str]:
    name, colon, port = host.rpartition(":")
    return (name, port) if colon and not port.endswith("]") else (host, "")


def _label_matches(pattern: str, label: str) -> bool:
    return pattern == label or fnmatch.fnmatchcase(label, pattern)


MAX_BYTES = 1024 * 1024
_SECRET_KEYS = {
    "kubernetes.io/dockerconfigjson": ".dockerconfigjson",
    "kubernetes.io/dockercfg": ".dockercfg",
}
_FIELDS = ("username", "password", "auth", "identitytoken", "email")
_SURROGATE = re.compile("[\ud800-\udfff]")


class BadCredentials(ValueError):
    """A credentials document is invalid; the message contains nothing of its content."""


@dataclass(frozen=True, slots=True)
class PullSecret:
    """A secret that a pod names in `imagePullSecrets`."""

    namespace: str
    name: str
    type: str
    """`kubernetes.io/dockerconfigjson` or `kubernetes.io/dockercfg`; other types have no credentials."""
    data: Mapping[str, bytes] = field(repr=False)
    uid: str = ""


def secrets_keyring(secrets: Iterable[PullSecret]) -> Keyring:
    """Return a keyring with the credentials of a pod's pull secrets. Raises BadCredentials."""
    keyring = Keyring()
    for secret in secrets:
        content = secret.data.get(_SECRET_KEYS.get(secret.type, ""), b"")
        if content:
            read = read_config_json if secret.type == "kubernetes.io/dockerconfigjson" else read_dockercfg
            try:
                registries = read(content)
            except BadCredentials as err:
                raise BadCredentials(f"pull secret {secret.namespace}/{secret.name}: {err}") from None
            keyring.add(registries, SecretCoordinates(secret.uid, secret.namespace, secret.name))
    return keyring


def read_config_json(content: bytes) -> Registries:
    """Parse a `config.json`. Raises BadCredentials."""
    document = _mapping(_json(content), "it")
    auths = next((value for key, value in document.items() if key.lower() == "auths"), None)
    return _registries(auths, "auths")


def read_dockercfg(content: bytes) -> Registries:
    """Parse a legacy `.dockercfg`. Raises BadCredentials."""
    return _registries(_json(content), "it")


@dataclass(frozen=True, slots=True)
class NodeCredentials:
    """The node's own credentials, usable by every pod: the first valid file of a search path."""

    root_dir: Path
    working_dir: Path
    home: Path | None = None

    def files(self) -> list[tuple[Path, Callable[[bytes], Registries]]]:
        """Return the search path: files in order, each with its parser."""
        kubelet_dirs = [self.root_dir, self.working_dir]
        homes = [self.home] if self.home is not None else []
        new = [*kubelet_dirs, *(home / ".docker" for home in homes), Path("/.docker")]
        old = [*kubelet_dirs, *homes, Path("/")]
        return [
            *((directory / "config.json", read_config_json) for directory in new),
            *((directory / ".dockercfg", read_dockercfg) for directory in old),
        ]

    async def load(self) -> Registries:
        """Run `read` in a thread."""
        return await asyncio.to_thread(self.read)

    def read(self) -> Registries:
        """Return the content of the first valid file; an invalid file is skipped with a warning."""
        for path, parse in self.files():
            try:
                with path.open("rb") as file:
                    content = file.read(MAX_BYTES + 1)
                if len(content) > MAX_BYTES:
                    raise BadCredentials(f"it is larger than {MAX_BYTES // 1024**2} MiB")
                found = parse(content)
            except (FileNotFoundError, NotADirectoryError):
                continue
            except (OSError, BadCredentials) as err:
                reason = err.strerror if isinstance(err, OSError) else str(err)
                log.warning("Ignored invalid registry credentials file", path=str(path), err=reason)
                continue
            log.v(4).info("Using registry credentials of the node", path=str(path))
            return found
        return {}


def _json(content: bytes) -> Any:
    try:
        return json.loads(content)
    except (ValueError, RecursionError):
        raise BadCredentials("it is not JSON: write what docker login writes") from None


def _registries(value: Any, what: str) -> Registries:
    return {
        registry: _credentials(_mapping(entry, f"the entry of {redacted(registry)}"), registry)
        for registry, entry in _mapping(value, what).items()
    }


def _mapping(value: Any, what: str) -> dict[str, Any]:
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise BadCredentials(f"{what} must be a mapping: write what docker login writes")
    return value


def _credentials(entry: dict[str, Any], registry: str) -> Credentials:
    # Keys are case-insensitive: these files are often written by hand.
    fields = {key.lower(): value for key, value in entry.items() if value is not None}
    for name in _FIELDS:
        if not isinstance(fields.setdefault(name, ""), str):
            raise BadCredentials(f"{name} of {redacted(registry)} must be text")
        # JSON can escape a lone surrogate, which cannot be encoded as UTF-8.
        fields[name] = _SURROGATE.sub("\ufffd", fields[name])
    if fields["identitytoken"]:
        # With a token, username and password are placeholders, and the runtime would prefer them.
        return Credentials(identity_token=fields["identitytoken"], email=fields["email"])
    username, password = fields["username"], fields["password"]
    if fields["auth"]:
        username, password = _decode(fields["auth"], registry)
    return Credentials(username, password, email=fields["email"])


def _decode(auth: str, registry: str) -> tuple[str, str]:
    """Decode base64 of `user:password`, with or without padding. Raises BadCredentials."""
    text = auth.replace("\r", "").replace("\n", "")
    if not text.endswith("="):
        text += "=" * (-len(text) % 4)
    try:
        username, colon, password = base64.b64decode(text, validate=True).decode().partition(":")
    except (binascii.Error, ValueError):
        raise BadCredentials(f"auth of {redacted(registry)} must be base64 of user:password") from None
    if not colon:
        raise BadCredentials(f"auth of {redacted(registry)} must be base64 of user:password")
    return username, password


async def pull_secrets(pod: Pod, objects: PodObjects, journal: PodHistory) -> list[PullSecret]:
    """Return the pull secrets that can be retrieved, in the pod's order; record an event for the others."""
    found, failed = [], []
    for reference in pod.spec.image_pull_secrets:
        if not reference.name:
            continue
        try:
            secret = await objects.secret(pod, reference.name)
        except ObjectError as err:
            log.info(
                "Unable to retrieve pull secret, the image pull may not succeed",
                pod=pod.full_name,
                secret=reference.name,
                err=err,
            )
            failed.append(reference.name)
        else:
            namespace, uid = pod.metadata.namespace, secret.metadata.uid
            found.append(PullSecret(namespace, reference.name, secret.type, secret.data, uid))
    if failed:
        journal.event(
            pod,
            "Warning",
            "FailedToRetrieveImagePullSecret",
            f"Unable to retrieve some image pull secrets ({', '.join(failed)}); "
            "attempting to pull the image may not succeed.",
        )
    return found
