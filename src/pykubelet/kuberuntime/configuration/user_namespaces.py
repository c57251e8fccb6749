"""ID ranges of pods with a user namespace (`hostUsers: false`).

Each pod gets its own range, so that root in one pod is an unprivileged user on the host and in other pods. A
pod's range is written to its directory before it is used, in upstream's format, because it must stay the same
for the pod's lifetime, across restarts and switches of the kubelet; the ranges in use are read from these
files.
"""

from __future__ import annotations

import pwd
import shutil
import subprocess
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import msgspec

from pykubelet.api.pod import Pod
from pykubelet.kuberuntime.configuration.options import IdMappings, IdRange
from pykubelet.kuberuntime.errors import ContainerConfigError
from pykubelet.kuberuntime.paths import PodDirs
from pykubelet.util.files import write_atomically

UNIT = 65536
FILE = "userns"
USER = "kubelet"
_ALL_IDS = 2**32


class _Mapping(msgspec.Struct, rename="camel"):
    host_id: int
    container_id: int
    length: int


class _File(msgspec.Struct, kw_only=True):
    uid_mappings: list[_Mapping] = msgspec.field(name="uidMappings")
    gid_mappings: list[_Mapping] = msgspec.field(name="gidMappings")


@dataclass(frozen=True, slots=True)
class UserNamespaceRange:
    """IDs available to pods: `count` of them from `first`, in blocks of `block`."""

    first: int
    count: int
    block: int

    def problem(self, max_pods: int) -> str | None:
        """Return the reason why this range is invalid, or None."""
        if self.first % self.block or self.count % self.block:
            return f"the ids of user {USER} must begin at and be a multiple of {self.block}"
        if self.first < self.block:
            return f"the ids of user {USER} must not begin below {self.block}: those are the machine's"
        if self.count // self.block < max_pods:
            return f"the ids of user {USER} are too few for {max_pods} pods of {self.block} ids each"
        return None


def read_id_space(block: int) -> UserNamespaceRange:
    """Return the IDs for pods: the subordinate IDs of user `kubelet`, or all but the first block.

    Raises ContainerConfigError when that user exists and its IDs cannot be determined.
    """
    all_ids = UserNamespaceRange(block, _ALL_IDS - block, block)
    program = shutil.which("getsubids")
    try:
        pwd.getpwnam(USER)
    except KeyError:
        return all_ids
    if program is None:
        return all_ids
    outputs = []
    for argv in ([program, USER], [program, "-g", USER]):
        result = subprocess.run(argv, capture_output=True, text=True, timeout=10, check=False)
        if result.returncode != 0:
            raise ContainerConfigError(
                f"getsubids does not tell the ids of user {USER}: {result.stderr.strip()}"
            )
        outputs.append(result.stdout)
    if outputs[0] != outputs[1]:
        raise ContainerConfigError(
            f"user {USER} has other subuids than subgids: make /etc/subuid and /etc/subgid agree"
        )
    return parse_getsubids(outputs[0], block)


def parse_getsubids(text: str, block: int) -> UserNamespaceRange:
    """Parse the output of getsubids, which must be one line: `0: kubelet 65536 7208960`."""
    lines = text.strip().splitlines()
    fields = lines[0].split() if len(lines) == 1 else []
    if len(fields) != 4 or not (fields[2].isdecimal() and fields[3].isdecimal()):
        raise ContainerConfigError(
            f"user {USER} must have exactly one range of subordinate ids, not {text!r}"
        )
    return UserNamespaceRange(int(fields[2]), int(fields[3]), block)


class UserNamespaces:
    """Allocator of ID blocks; its state is in the pods' directories."""

    def __init__(self, dirs: PodDirs, space: UserNamespaceRange, *, supported: Callable[[str], bool]) -> None:
        """Initialize; `supported` returns whether a runtime handler supports user namespaces."""
        self._dirs = dirs
        self._space = space
        self._supported = supported

    def mappings_for(self, pod: Pod, handler: str = "") -> IdMappings | None:
        """Return the pod's mappings, allocated with the first call; None for pods without a user namespace.

        Raises ContainerConfigError when the runtime handler does not support user namespaces, no block is
        free or a pod's file is invalid.
        """
        if pod.spec.host_users is not False:
            return None
        if not self._supported(handler):
            subject = f'RuntimeClass handler "{handler}"' if handler else "runtime"
            raise ContainerConfigError(
                f"can't set `spec.hostUsers: false`, {subject} does not support user namespaces"
            )
        first = self._read(pod.uid)
        if first is None:
            first = self._free_block()
            self._write(pod.uid, first)
        ids = (IdRange(container_id=0, host_id=first, length=self._space.block),)
        return IdMappings(uids=ids, gids=ids)

    def _free_block(self) -> int:
        used = {self._read(uid) for uid in self._dirs.uids()}
        space = self._space
        for first in range(space.first, space.first + space.count, space.block):
            if first not in used:
                return first
        raise ContainerConfigError("all ids for user namespaces are in use")

    def _path(self, uid: str) -> Path:
        return self._dirs.pod(uid) / FILE

    def _read(self, uid: str) -> int | None:
        try:
            found = msgspec.json.decode(self._path(uid).read_bytes(), type=_File)
        except FileNotFoundError:
            return None
        except (msgspec.MsgspecError, OSError) as err:
            raise ContainerConfigError(f"the user namespace of pod {uid} can not be read: {err}") from err
        if len(found.uid_mappings) != 1 or found.uid_mappings != found.gid_mappings:
            raise ContainerConfigError(
                f"the user namespace of pod {uid} is not one range for users and groups alike"
            )
        (mapping,) = found.uid_mappings
        if mapping.container_id != 0 or mapping.length != self._space.block:
            raise ContainerConfigError(
                f"the user namespace of pod {uid} has another size than idsPerPod says"
            )
        return mapping.host_id

    def _write(self, uid: str, first: int) -> None:
        mapping = _Mapping(first, 0, self._space.block)
        self._dirs.make(uid)
        path = self._path(uid)
        content = msgspec.json.encode(_File(uid_mappings=[mapping], gid_mappings=[mapping]))
        write_atomically(path, content, 0o644, temporary=path.with_name(f".{FILE}"))
