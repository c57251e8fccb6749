"""Handing a manifest to the node: where it goes in the manifests folder, and putting it there whole.

A manifest keeps its file's name, so that its owner finds it again. Writing the same pods anew is an
update; whatever would silently push out or double another pod is refused.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path

from pykubelet.api.pod import Pod
from pykubelet.config.errors import ConfigError
from pykubelet.pods.manifests import read_bytes, read_manifest
from pykubelet.pods.static import complete_static_pod

Names = frozenset[str]
"""Pods as `namespace/name`."""


class ClashError(Exception):
    """The manifest would get in the way of another; the text says of which and what to do."""


@dataclass(frozen=True, slots=True)
class Plan:
    """What to do in the manifests folder."""

    target: Path
    remove: tuple[Path, ...] = ()
    """Files whose pods the new one takes over."""


def names_of(pods: Collection[Pod]) -> Names:
    """Give the names of pods as they are written; raises ClashError when two have the same."""
    names = [f"{pod.metadata.namespace or 'default'}/{pod.metadata.name}" for pod in pods]
    for name in names:
        if names.count(name) > 1:
            raise ClashError(f"pod {name} is in the manifest twice: rename one, or remove it")
    return frozenset(names)


def plan_handover(target: Path, names: Names, present: Mapping[Path, Names | None], *, replace: bool) -> Plan:
    """Decide what to do for a manifest with these pods; `present` is the folder, None for what is unreadable.

    Raises ClashError when another pod would be lost or doubled, unless `replace` says that it may.
    """
    if target.name.startswith("."):
        raise ClashError(f"{target.name} is a hidden file, which the node ignores: rename it")
    old = present.get(target, frozenset())
    if not replace and (old is None or old - names):
        holds = "something that cannot be read" if old is None else f"pod {', '.join(sorted(old - names))}"
        raise ClashError(
            f"{target} is there already and holds {holds}: "
            "rename your file, or say --replace to put yours in its place"
        )
    doubles = []
    for file, others in sorted(present.items()):
        if file == target or not others or not others & names:
            continue
        same = ", ".join(sorted(others & names))
        if others - names:
            raise ClashError(
                f"pod {same} is already in {file}, with others: take it out there, or rename yours"
            )
        if not replace:
            raise ClashError(f"pod {same} is already in {file}: rename yours, or say --replace to move it")
        doubles.append(file)
    return Plan(target, tuple(doubles))


def look_around(folder: Path) -> dict[Path, Names | None]:
    """Read which pods the manifests folder holds; raises OSError when it cannot be listed."""
    present: dict[Path, Names | None] = {}
    for file in folder.iterdir():
        if file.name.startswith(".") or not file.is_file():
            continue
        try:
            present[file] = names_of(read_manifest(read_bytes(file), str(file)))
        except (ConfigError, ClashError, OSError):
            present[file] = None
    return present


def carry_out(plan: Plan, content: bytes) -> None:
    """Write the manifest and remove what it takes over; raises OSError."""
    write_atomically(plan.target, content)
    for file in plan.remove:
        file.unlink(missing_ok=True)


def write_atomically(target: Path, content: bytes) -> None:
    """Write a file so that whoever looks sees the old content or the new, never a part; raises OSError."""
    # The node ignores hidden files, so it does not see this one grow.
    handle, name = tempfile.mkstemp(prefix=f".{target.name}.", dir=target.parent)
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        Path(name).chmod(0o644)
        Path(name).replace(target)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise


def find_mine(pods: Collection[Pod], written: Pod, target: Path) -> Pod | None:
    """Find what the node made of a manifest's pod, in exactly this version: its uid tells."""
    for pod in pods:
        node = pod.spec.node_name
        if pod.metadata.name == f"{written.metadata.name}-{node.lower()}":
            made = complete_static_pod(written, source="file", origin=str(target), node_name=node, now=0)
            if (made.uid, made.metadata.namespace) == (pod.uid, pod.metadata.namespace):
                return pod
    return None
