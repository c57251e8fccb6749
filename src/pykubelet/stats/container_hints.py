"""File of hints about cgroups (`--container-hints`), for cAdvisor's metrics of file systems.

The file names mount points of a cgroup that belongs to no container of the runtime, such as
`{"all_hosts": [{"full_path": "/system.slice", "mounts": [{"host_dir": "/data"}]}]}`. cAdvisor reports the
file systems that are mounted there as those of the cgroup. It decodes a network interface as well and never
uses it. The file is read once, at the start; cAdvisor reads it again for each new cgroup.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType

import msgspec

Hints = Mapping[str, frozenset[str]]
"""Mount points by cgroup path."""
NO_HINTS: Hints = MappingProxyType({})
MAX_BYTES = 1024 * 1024


class HintsError(Exception):
    """Raised when the file cannot be used; one line with the path, the cause and the remedy."""


class _Mount(msgspec.Struct):
    host_dir: str = ""


class _Hint(msgspec.Struct):
    full_path: str = ""
    mounts: list[_Mount] | None = None


class _File(msgspec.Struct):
    all_hosts: list[_Hint] | None = None


def read_container_hints(path: Path) -> Hints:
    """Return the hints, none if the file does not exist; of hints about the same cgroup the first counts.

    Raises HintsError.
    """
    try:
        with path.open("rb") as file:
            data = file.read(MAX_BYTES + 1)
        if len(data) > MAX_BYTES:
            raise HintsError(f"cannot use container hints {path}: it is larger than {MAX_BYTES} bytes")
        found = msgspec.json.decode(data, type=_File | None)
    except FileNotFoundError:
        return {}
    except OSError as err:
        raise HintsError(f"cannot read container hints {path}: {err.strerror or err}") from err
    except msgspec.DecodeError as err:
        raise HintsError(
            f"cannot use container hints {path}: {err}; correct the file or set another --container-hints"
        ) from err
    hints: dict[str, frozenset[str]] = {}
    for hint in (found.all_hosts or ()) if found is not None else ():
        mounts = frozenset(mount.host_dir for mount in hint.mounts or ())
        hints.setdefault(hint.full_path, mounts)
    return hints
