"""Parser of image names: registry, repository, tag and digest.

A pod may use a short name (`busybox`, `team/app`); credentials and the runtime need the complete one. The
rules and the error texts are those of the Docker reference library, because the texts appear in pod statuses.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass

DEFAULT_TAG = "latest"
HUB = "docker.io"
"""Registry of names without one."""
_HUB_OLD_NAME = "index.docker.io"
_OFFICIAL = "library/"
_MAX_PATH_LENGTH = 255
_MAX_NAME_LENGTH = 4096
"""Characters of the longest accepted name: a hostile manifest may contain megabytes."""
_MAX_MESSAGE_LENGTH = 1000
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
    """An image name is invalid; the message appears in the pod's status."""


@dataclass(frozen=True, slots=True)
class ImageName:
    """A parsed image name."""

    original: str
    """Name as in the pod spec."""
    repository: str
    """Repository with registry, without tag and digest: `docker.io/library/busybox`."""
    tag: str
    """Tag; `latest` when the name has neither tag nor digest, empty when it has only a digest."""
    digest: str
    """Digest (`sha256:…`), or empty."""

    @property
    def registry(self) -> str:
        """Host of the registry, with its port if there is one."""
        return self.repository.partition("/")[0]

    @property
    def for_runtime(self) -> str:
        """Name for the runtime: the given name with a tag, or with its digest.

        A short name stays short: the runtime decides which registry it refers to.
        """
        if self.digest or self.original.endswith(f":{self.tag}"):
            return self.original
        return f"{self.original}:{self.tag}"

    @property
    def listed_names(self) -> frozenset[str]:
        """Names under which a runtime may list the image: as given, with registry and tag, with digest."""
        found = {self.for_runtime}
        if self.tag:
            found.add(f"{self.repository}:{self.tag}")
        if self.digest:
            found.add(f"{self.repository}@{self.digest}")
        return frozenset(found)

    @property
    def without_tag(self) -> str:
        """The name as the pod has it, without tag and digest."""
        return self.original.removesuffix(f"@{self.digest}").removesuffix(f":{self.tag}")


def parse_image_name(name: str) -> ImageName:
    """Parse an image name. Raises InvalidImageName."""
    try:
        return _parse(name)
    except InvalidImageName as err:
        quoted = json.dumps(truncated(name), ensure_ascii=False)
        raise InvalidImageName(f"couldn't parse image name {quoted}: {err}") from None


def truncated(name: str) -> str:
    """Return a name truncated for messages: an invalid one may have megabytes."""
    return name if len(name) <= _MAX_MESSAGE_LENGTH else f"{name[:_MAX_MESSAGE_LENGTH]}…"


def _parse(name: str) -> ImageName:
    if len(name) > _MAX_NAME_LENGTH:
        raise _too_long()
    if _IMAGE_ID.fullmatch(name):
        raise InvalidImageName(
            f"invalid repository name ({name}), cannot specify 64-byte hexadecimal strings"
        )
    registry, rest = _split_registry(name)
    path = rest.partition(":")[0]
    if path != path.lower():
        raise InvalidImageName(
            f"invalid reference format: repository name ({truncated(path)}) must be lowercase"
        )
    full_name = f"{registry}/{rest}"
    found = _REFERENCE.fullmatch(full_name)
    if found is None:
        if _REFERENCE.fullmatch(full_name.lower()):
            raise InvalidImageName("repository name must be lowercase")
        raise InvalidImageName("invalid reference format")
    if len(found["path"]) > _MAX_PATH_LENGTH:
        raise _too_long()
    tag, digest = found["tag"] or "", found["digest"] or ""
    if digest:
        _check_digest(digest)
    elif not tag:
        tag = DEFAULT_TAG
    return ImageName(name, found["name"], tag, digest)


def _split_registry(name: str) -> tuple[str, str]:
    """Split off the registry; without one the first part belongs to a repository of Docker Hub."""
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
    return InvalidImageName(f"repository name must not be more than {_MAX_PATH_LENGTH} characters")
