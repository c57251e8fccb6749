"""What the name of an image says: which registry, which repository, which tag or digest.

A pod may name an image as people do (`busybox`, `team/app`); whoever looks for credentials or asks
the runtime needs the whole of it. The rules are those of every Docker-compatible tool, and so are
the words for names that cannot be read, because they end up in pod statuses.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass

DEFAULT_TAG = "latest"
HUB = "docker.io"
"""The registry of names that have none."""
_HUB_OLD_NAME = "index.docker.io"
_OFFICIAL = "library/"
_LONGEST_PATH = 255
_LONGEST_NAME = 4096
"""No registry has longer ones, and a hostile manifest may have megabytes."""
_LONGEST_SHOWN = 1000
_HOST_PART = r"[a-zA-Z0-9](?:[a-zA-Z0-9-]*[a-zA-Z0-9])?"
_REGISTRY = rf"(?:{_HOST_PART}(?:\.{_HOST_PART})*|\[[a-fA-F0-9:]+\])(?::[0-9]+)?"
_PATH_PART = r"[a-z0-9]+(?:(?:[._]|__|-+)[a-z0-9]+)*"
_REFERENCE = re.compile(
    rf"(?P<name>(?:{_REGISTRY}/)?(?P<path>{_PATH_PART}(?:/{_PATH_PART})*))"
    r"(?::(?P<tag>\w[\w.-]{0,127}))?"
    r"(?:@(?P<digest>[A-Za-z][A-Za-z0-9]*(?:[-_+.][A-Za-z][A-Za-z0-9]*)*:[0-9a-fA-F]{32,}))?",
    re.ASCII,
)
_IMAGE_ID = re.compile(r"[a-f0-9]{64}")
_DIGEST_CHARACTERS = {"sha256": 64, "sha384": 96, "sha512": 128}


class InvalidImageName(ValueError):
    """A text that does not name an image; the message is the one that the pod's status shows."""


@dataclass(frozen=True, slots=True)
class ImageName:
    """The name of an image, taken apart."""

    given: str
    """As the pod has it."""
    repository: str
    """With its registry and without tag and digest: `docker.io/library/busybox`."""
    tag: str
    """`latest` when neither a tag nor a digest was given; empty beside a digest alone."""
    digest: str
    """`sha256:…`, or empty."""

    @property
    def registry(self) -> str:
        """The host, with its port if it has one."""
        return self.repository.partition("/")[0]

    @property
    def for_runtime(self) -> str:
        """What to ask the runtime for: the given name with a tag, or with its digest.

        A short name stays short: which registry it means is the runtime's decision.
        """
        if self.digest or self.given.endswith(f":{self.tag}"):
            return self.given
        return f"{self.given}:{self.tag}"

    @property
    def without_tag(self) -> str:
        """The name as the pod has it, without tag and digest."""
        return self.given.removesuffix(f"@{self.digest}").removesuffix(f":{self.tag}")


def parse_image_name(given: str) -> ImageName:
    """Take the name of an image apart; raises InvalidImageName."""
    try:
        return _parse(given)
    except InvalidImageName as err:
        quoted = json.dumps(shortened(given), ensure_ascii=False)
        raise InvalidImageName(f"couldn't parse image name {quoted}: {err}") from None


def shortened(given: str) -> str:
    """Give as much of a name as belongs into a message: a bad one may be megabytes."""
    return given if len(given) <= _LONGEST_SHOWN else f"{given[:_LONGEST_SHOWN]}…"


def _parse(given: str) -> ImageName:
    if len(given) > _LONGEST_NAME:
        raise _too_long()
    if _IMAGE_ID.fullmatch(given):
        raise InvalidImageName(
            f"invalid repository name ({given}), cannot specify 64-byte hexadecimal strings"
        )
    registry, rest = _split_registry(given)
    path = rest.partition(":")[0]
    if path != path.lower():
        raise InvalidImageName(
            f"invalid reference format: repository name ({shortened(path)}) must be lowercase"
        )
    whole = f"{registry}/{rest}"
    found = _REFERENCE.fullmatch(whole)
    if found is None:
        if _REFERENCE.fullmatch(whole.lower()):
            raise InvalidImageName("repository name must be lowercase")
        raise InvalidImageName("invalid reference format")
    if len(found["path"]) > _LONGEST_PATH:
        raise _too_long()
    tag, digest = found["tag"] or "", found["digest"] or ""
    if digest:
        _check_digest(digest)
    elif not tag:
        tag = DEFAULT_TAG
    return ImageName(given, found["name"], tag, digest)


def _split_registry(name: str) -> tuple[str, str]:
    """Tell a registry from the first part of a path, which looks the same at first sight."""
    first, slash, rest = name.partition("/")
    is_host = first == "localhost" or "." in first or ":" in first or first != first.lower()
    if not slash or not is_host:
        registry, rest = HUB, name
    else:
        registry = HUB if first == _HUB_OLD_NAME else first
    if registry == HUB and "/" not in rest:
        rest = _OFFICIAL + rest
    return registry, rest


def _check_digest(digest: str) -> None:
    algorithm, _, characters = digest.partition(":")
    expected = _DIGEST_CHARACTERS.get(algorithm)
    if expected is None:
        raise InvalidImageName("unsupported digest algorithm")
    if len(characters) != expected:
        raise InvalidImageName("invalid checksum digest length")
    if characters != characters.lower():
        raise InvalidImageName("invalid checksum digest format")


def _too_long() -> InvalidImageName:
    return InvalidImageName(f"repository name must not be more than {_LONGEST_PATH} characters")
