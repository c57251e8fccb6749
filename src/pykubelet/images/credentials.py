"""Where registry credentials come from: pull secrets of a pod, and files of the node.

Both hold what `docker login` writes, in its present form (`config.json`, with `auths`) or the old
one (`.dockercfg`, the registries at the top). No message of this module contains anything of what
it read.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import json
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pykubelet.images.keyring import Credentials, Keyring, Registries, SecretCoordinates, shown
from pykubelet.logs import get_logger

log = get_logger(__name__)

MAX_BYTES = 1024 * 1024

_SECRET_KEYS = {
    "kubernetes.io/dockerconfigjson": ".dockerconfigjson",
    "kubernetes.io/dockercfg": ".dockercfg",
}
_FIELDS = ("username", "password", "auth", "identitytoken", "email")
_SURROGATE = re.compile("[\ud800-\udfff]")


class BadCredentials(ValueError):
    """Something that should hold credentials does not; the message says nothing of its content."""


@dataclass(frozen=True, slots=True)
class PullSecret:
    """A secret that a pod names in `imagePullSecrets`."""

    namespace: str
    name: str
    type: str
    """`kubernetes.io/dockerconfigjson` or `kubernetes.io/dockercfg`; others hold no credentials."""
    data: Mapping[str, bytes] = field(repr=False)
    uid: str = ""


def secrets_keyring(secrets: Iterable[PullSecret]) -> Keyring:
    """Gather the credentials of a pod's pull secrets; raises BadCredentials."""
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
    """Read a `config.json`; raises BadCredentials."""
    document = _mapping(_json(content), "it")
    auths = next((value for key, value in document.items() if key.lower() == "auths"), None)
    return _registries(auths, "auths")


def read_dockercfg(content: bytes) -> Registries:
    """Read an old `.dockercfg`; raises BadCredentials."""
    return _registries(_json(content), "it")


@dataclass(frozen=True, slots=True)
class NodeCredentials:
    """The node's own credentials, for every pod: the first readable file of several."""

    root_dir: Path
    working_dir: Path
    home: Path | None = None

    def files(self) -> list[tuple[Path, Callable[[bytes], Registries]]]:
        """Give the places to look at, in order, with how to read each."""
        near = [self.root_dir, self.working_dir]
        homes = [self.home] if self.home is not None else []
        new = [*near, *(home / ".docker" for home in homes), Path("/.docker")]
        old = [*near, *homes, Path("/")]
        return [
            *((folder / "config.json", read_config_json) for folder in new),
            *((folder / ".dockercfg", read_dockercfg) for folder in old),
        ]

    async def load(self) -> Registries:
        """Read the files in a thread; see `read`."""
        return await asyncio.to_thread(self.read)

    def read(self) -> Registries:
        """Read the files as they are now; a file that cannot be used is passed over with a warning."""
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
                why = err.strerror if isinstance(err, OSError) else str(err)
                log.warning("Passing over a file with registry logins", path=str(path), reason=why)
                continue
            log.v(4).info("Using registry logins of the node", path=str(path))
            return found
        return {}


def _json(content: bytes) -> Any:
    try:
        return json.loads(content)
    except (ValueError, RecursionError):
        raise BadCredentials("it is not JSON: write what docker login writes") from None


def _registries(value: Any, what: str) -> Registries:
    return {
        registry: _credentials(_mapping(entry, f"the entry of {shown(registry)}"), registry)
        for registry, entry in _mapping(value, what).items()
    }


def _mapping(value: Any, what: str) -> dict[str, Any]:
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise BadCredentials(f"{what} must be a mapping: write what docker login writes")
    return value


def _credentials(entry: dict[str, Any], registry: str) -> Credentials:
    # Those who wrote these files by hand were never told about upper and lower case.
    given = {key.lower(): value for key, value in entry.items() if value is not None}
    for name in _FIELDS:
        if not isinstance(given.setdefault(name, ""), str):
            raise BadCredentials(f"{name} of {shown(registry)} must be text")
        # JSON can escape half of a surrogate pair, which no UTF-8 text can contain.
        given[name] = _SURROGATE.sub("\ufffd", given[name])
    if given["identitytoken"]:
        # Beside a token, user and password are placeholders, and the runtime would prefer them.
        return Credentials(identity_token=given["identitytoken"], email=given["email"])
    username, password = given["username"], given["password"]
    if given["auth"]:
        username, password = _decode(given["auth"], registry)
    return Credentials(username, password, email=given["email"])


def _decode(auth: str, registry: str) -> tuple[str, str]:
    """Return the parts of base64 of `user:password`, with or without padding."""
    text = auth.replace("\r", "").replace("\n", "")
    if not text.endswith("="):
        text += "=" * (-len(text) % 4)
    try:
        username, colon, password = base64.b64decode(text, validate=True).decode().partition(":")
    except (binascii.Error, ValueError):
        raise BadCredentials(f"auth of {shown(registry)} must be base64 of user:password") from None
    if not colon:
        raise BadCredentials(f"auth of {shown(registry)} must be base64 of user:password")
    return username, password
