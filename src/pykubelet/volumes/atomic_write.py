"""Replacing all files of a volume at once, under the eyes of the processes that read them.

The files lie in a folder of their own, and everything that readers see leads there through one link:

    ..2026_01_31_12_00_00.123456789/   the files
    ..data -> ..2026_01_31_12_00_00.123456789
    name -> ..data/name                one for each first part of the files' paths

A new version is written to a new folder, and then `..data` is renamed into place: a reader sees all
of the old version or all of the new one, also when the agent is killed at any moment. What a killed
writer left behind is taken away by the next one. Nothing is written when nothing has changed.

Containers see these volumes read-only. Should one write nevertheless, it gains nothing: each step is
taken from an opened folder, no link is followed, and nothing that is mounted inside is deleted.
"""

from __future__ import annotations

import errno
import os
import secrets
import stat
import time
from contextlib import suppress
from pathlib import Path

from pykubelet.host.tree_removal import remove_entry
from pykubelet.volumes.files import File, Files, Tree, as_tree
from pykubelet.volumes.ownership import give_opened, group_mode

DATA = "..data"
NEXT = "..data_tmp"

_HIDDEN = ".."
_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_NEW_FILE = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
# A pipe in a file's place must not make us wait for its writer.
_OLD_FILE = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
_FOLDER_MODE = 0o755


def publish(volume: Path, files: Files, group: int | None = None, *, moment: float) -> bool:
    """Let a volume have exactly these files, readable for `group` if one is given.

    `moment` is the time (Unix) that the version's folder is named after. Gives whether anything had
    to be written. Raises KindError for paths that cannot be, before anything is touched, and OSError;
    then readers still see the version before. Blocks.
    """
    tree = as_tree(files)
    root = os.open(volume, _FOLDER)
    try:
        version = _current(root)
        changed = version is None or not _is_there(root, version, tree)
        if version is None or changed:
            version = _write_version(root, tree, group, moment)
        _tidy(root, version, tree)
        return changed
    finally:
        os.close(root)


def _current(root: int) -> str | None:
    try:
        version = os.readlink(DATA, dir_fd=root)
    except FileNotFoundError:
        return None
    except OSError as err:
        if err.errno == errno.EINVAL:
            return None
        raise
    plain = version.startswith(_HIDDEN) and "/" not in version and version not in (_HIDDEN, DATA, NEXT)
    return version if plain else None


def _is_there(at: int, name: str, wanted: File | Tree) -> bool:
    """Whether exactly this is in a folder under this name."""
    try:
        opened = os.open(name, _OLD_FILE, dir_fd=at)
    except (FileNotFoundError, NotADirectoryError):
        return False
    except OSError as err:
        if err.errno in (errno.ELOOP, errno.ENXIO):
            return False
        raise
    try:
        found = os.fstat(opened)
        if isinstance(wanted, dict):
            if not stat.S_ISDIR(found.st_mode) or set(_names(opened)) != wanted.keys():
                return False
            return all(_is_there(opened, inner, file) for inner, file in wanted.items())
        if not stat.S_ISREG(found.st_mode) or found.st_size != len(wanted.data):
            return False
        with open(opened, "rb", closefd=False) as file:
            # Bounded: a process that can write the file may have extended it since.
            return file.read(len(wanted.data) + 1) == wanted.data
    finally:
        os.close(opened)


def _write_version(root: int, tree: Tree, group: int | None, moment: float) -> str:
    version = _new_name(moment)
    os.mkdir(version, 0o700, dir_fd=root)
    try:
        _fill(root, version, tree, group)
        remove_entry(root, NEXT)
        os.symlink(version, NEXT, dir_fd=root)
        os.rename(NEXT, DATA, src_dir_fd=root, dst_dir_fd=root)
    except OSError:
        with suppress(OSError):
            remove_entry(root, version)
        raise
    return version


def _new_name(moment: float) -> str:
    return f"{time.strftime('..%Y_%m_%d_%H_%M_%S', time.gmtime(moment))}.{secrets.randbelow(10**10):010}"


def _fill(at: int, name: str, tree: Tree, group: int | None) -> None:
    """Write files into a new folder, and open it for others when all is there."""
    folder = os.open(name, _FOLDER, dir_fd=at)
    try:
        for inner, wanted in tree.items():
            if isinstance(wanted, dict):
                os.mkdir(inner, 0o700, dir_fd=folder)
                _fill(folder, inner, wanted, group)
            else:
                _write_file(folder, inner, wanted, group)
        _hand_over(folder, _FOLDER_MODE, None, group, folder=True)
    finally:
        os.close(folder)


def _write_file(folder: int, name: str, file: File, group: int | None) -> None:
    opened = os.open(name, _NEW_FILE, 0o600 & file.mode, dir_fd=folder)
    try:
        left = memoryview(file.data)
        while left:
            left = left[os.write(opened, left) :]
        _hand_over(opened, file.mode, file.user, group, folder=False)
    finally:
        os.close(opened)


def _hand_over(opened: int, mode: int, user: int | None, group: int | None, *, folder: bool) -> None:
    if user is not None:
        os.fchown(opened, user, -1)
    if group is not None:
        give_opened(opened, group)
        mode = group_mode(mode, folder=folder, read_only=True)
    os.fchmod(opened, mode)


def _tidy(root: int, version: str, tree: Tree) -> None:
    """Let the links be there that lead to the files, and no others of ours.

    Folders that other volumes are mounted on stay, also in the place of a link.
    """
    kept = set()
    for name in _names(root):
        if name.startswith(_HIDDEN):
            if name not in (DATA, version):
                remove_entry(root, name)
            continue
        target = _link(root, name)
        ours = target == f"{DATA}/{name}"
        if target is not None and ours != (name in tree):
            os.unlink(name, dir_fd=root)
        else:
            kept.add(name)
    for name, wanted in tree.items():
        if name not in kept:
            os.symlink(f"{DATA}/{name}", name, dir_fd=root)
            if isinstance(wanted, File) and wanted.user is not None:
                os.chown(name, wanted.user, -1, dir_fd=root, follow_symlinks=False)


def _names(folder: int) -> list[str]:
    with os.scandir(folder) as entries:
        return [entry.name for entry in entries]


def _link(root: int, name: str) -> str | None:
    try:
        return os.readlink(name, dir_fd=root)
    except OSError:
        return None
