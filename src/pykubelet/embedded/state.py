"""What has to be remembered between starts: choices that must stay, and what was there before us.

The second is how `down` can tell a directory or a packet filter chain that exists because of us
from one that somebody else needs.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from ipaddress import IPv4Network
from pathlib import Path

import msgspec

from pykubelet.embedded.errors import EmbeddedError
from pykubelet.embedded.instance import Instance

OUTSIDE = (
    Path("/run/containerd/s"),
    Path("/run/containerd"),
    Path("/var/lib/cni/results"),
    Path("/var/lib/cni"),
)
"""Directories that containerd's shims and libcni make at fixed places, children first."""


class State(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """The content of `state.json`."""

    version: int = 1
    boot_id: str
    """The boot in which the state directory was last used."""
    subnet: str
    """The pods' network, such as `10.85.0.0/24`."""
    snapshotter: str
    found_paths: list[str]
    """Those of `OUTSIDE` that nobody of us made."""
    found_chains: list[str]
    """Those shared packet filter chains that nobody of us made."""
    removing: list[str] = []
    """Ids of the containers and sandboxes that `down` has begun to remove.

    A `down` that is interrupted may have removed their files, from which the next one would learn the ids.
    """
    seeds: dict[str, str] = {}
    """For each imported image what it was built from."""


def load(instance: Instance) -> State | None:
    """Read the state; None when there is none yet.

    Raises EmbeddedError when it is damaged.
    """
    try:
        found = msgspec.json.decode(instance.state.read_bytes(), type=State)
        IPv4Network(found.subnet)
        return found
    except FileNotFoundError:
        return None
    except (OSError, ValueError, msgspec.DecodeError) as err:
        raise EmbeddedError(
            f"{instance.state} is damaged ({err}): "
            f"run 'pykubelet down --data-dir {instance.data_dir}' and start again"
        ) from err


def save(instance: Instance, state: State) -> None:
    """Write the state so that a crash leaves either the old or the new one."""
    text = msgspec.json.format(msgspec.json.encode(state), indent=2)
    draft = instance.state.with_suffix(".new")
    with draft.open("wb") as file:
        file.write(text + b"\n")
        file.flush()
        os.fsync(file.fileno())
    draft.replace(instance.state)


def before_us(present: Iterable[str], others: Iterable[Iterable[str]]) -> list[str]:
    """Decide which of the things that are present now were made by none of us.

    `others` are the answers that the other private runtimes of this machine gave when they
    started: what one of them did not find is there because of one of us.
    """
    result = set(present)
    for found in others:
        result &= set(found)
    return sorted(result)
