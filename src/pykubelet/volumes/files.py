"""The files that a volume shall have, before any of them exists: names checked, content at hand.

Names come from people and from API objects. A path that would leave the volume, or hide among the
names that the writer keeps for itself (those that begin with two dots), is refused here, so that no
one further on has to think of it.
"""

from __future__ import annotations

import posixpath
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from pykubelet.api.volume_files import KeyToPath
from pykubelet.volumes.errors import KindError

LONGEST_PATH = 4096
LONGEST_NAME = 255
DEEPEST = 64
"""How many folders a file may lie in."""

_PERMISSIONS = 0o777


@dataclass(frozen=True, slots=True, repr=False)
class File:
    """A file's content, permissions and owner; None is the agent itself. The content is not shown."""

    data: bytes
    mode: int
    user: int | None = None

    def __repr__(self) -> str:
        return f"File({len(self.data)} bytes, mode={self.mode:#o}, user={self.user})"


Files = Mapping[str, File]
"""By their paths in the volume."""
Tree = dict[str, "File | Tree"]
"""The same, by folders."""


def of_keys(
    data: Mapping[str, bytes], items: Sequence[KeyToPath], mode: int, *, optional: bool, missing: str
) -> dict[str, File]:
    """Give the files of an object: one for each key, or for each item where there are any.

    An item whose key is not there is left out if that is fine (`optional`), else raises KindError
    with `missing` and the key.
    """
    if not items:
        return {key: File(value, mode) for key, value in data.items()}
    files = {}
    for item in items:
        if item.key in data:
            files[item.path] = File(data[item.key], mode if item.mode is None else item.mode)
        elif not optional:
            raise KindError(f"{missing}: {item.key}")
    return files


def as_tree(files: Files) -> Tree:
    """Sort files into folders; raises KindError for a path that no file in a volume may have."""
    tree: Tree = {}
    for path, file in files.items():
        *folders, name = checked_path(path).split("/")
        folder = tree
        for part in folders:
            inner = folder.setdefault(part, {})
            if isinstance(inner, File):
                raise KindError(f"invalid path: {part} cannot be a file and a folder: {path}")
            folder = inner
        if isinstance(folder.get(name), dict):
            raise KindError(f"invalid path: {name} cannot be a file and a folder: {path}")
        # Bits beyond the permissions would make programs that run as the agent's user.
        folder[name] = replace(file, mode=file.mode & _PERMISSIONS)
    return tree


def checked_path(path: str) -> str:
    """Give a path without detours; raises KindError when it is none inside of a volume."""
    parts = path.split("/")
    try:
        longest = max(len(part.encode()) for part in parts)
    except UnicodeEncodeError as err:
        raise KindError(f"invalid path: must be text: {path!r}") from err
    clean = posixpath.normpath(path)
    problem = ""
    if clean == "." or "\0" in path:
        problem = f"must name a file: {path!r}"
    elif path.startswith("/"):
        problem = f"must be relative path: {path}"
    elif len(path.encode()) > LONGEST_PATH:
        problem = f"must be less than or equal to {LONGEST_PATH} characters"
    elif ".." in parts:
        problem = f"must not contain '..': {path}"
    elif longest > LONGEST_NAME:
        problem = f"filenames must be less than or equal to {LONGEST_NAME} characters"
    elif clean.startswith(".."):
        problem = f"must not start with '..': {path}"
    elif clean.count("/") > DEEPEST:
        problem = f"must not have more than {DEEPEST} folders"
    if problem:
        raise KindError(f"invalid path: {problem}")
    return clean
