"""Handing a manifest to the node: where it goes in the manifests folder, and putting it there whole.

A manifest keeps its file's name, so that its owner finds it again. Writing the same pods and objects anew
is an update; whatever would silently push out or double another is refused. One that holds a secret can
be read by its owner only.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path

from pykubelet.api.pod import Pod
from pykubelet.config.errors import ConfigError
from pykubelet.pods.manifests import Contents, read_bytes, read_manifest
from pykubelet.pods.object_manifests import title
from pykubelet.pods.static import complete_static_pod

Names = frozenset[str]
"""What manifests hold, such as `pod default/web` and `configMap default/page`."""

PUBLIC, PRIVATE = 0o644, 0o600


class ClashError(Exception):
    """The manifest would get in the way of another; the text says of which and what to do."""


@dataclass(frozen=True, slots=True)
class Plan:
    """What to do in the manifests folder."""

    target: Path
    remove: tuple[Path, ...] = ()
    """Files whose contents the new one takes over."""


def names_of(written: Contents) -> Names:
    """Give the names of what is in a manifest, as it is written; raises ClashError when two have the same."""
    names = [f"pod {pod.metadata.namespace or 'default'}/{pod.metadata.name}" for pod in written.pods]
    names += [title(found) for found in written.objects]
    for name in names:
        if names.count(name) > 1:
            raise ClashError(f"{name} is in the manifest twice: rename one, or remove it")
    return frozenset(names)


def plan_handover(target: Path, names: Names, present: Mapping[Path, Names | None], *, replace: bool) -> Plan:
    """Decide what to do for a manifest with these names; `present` is the folder, None for bad files.

    Raises ClashError when something else would be lost or doubled, unless `replace` says that it may.
    """
    if target.name.startswith("."):
        raise ClashError(f"{target.name} is a hidden file, which the node ignores: rename it")
    old = present.get(target, frozenset())
    if not replace and (old is None or old - names):
        holds = "something that cannot be read" if old is None else ", ".join(sorted(old - names))
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
            raise ClashError(f"{same} is already in {file}, with others: take it out there, or rename yours")
        if not replace:
            raise ClashError(f"{same} is already in {file}: rename yours, or say --replace to move it")
        doubles.append(file)
    return Plan(target, tuple(doubles))


def look_around(folder: Path) -> dict[Path, Names | None]:
    """Read what the manifests folder holds; raises OSError when it cannot be listed."""
    present: dict[Path, Names | None] = {}
    for file in folder.iterdir():
        if file.name.startswith(".") or not file.is_file():
            continue
        try:
            present[file] = names_of(read_manifest(read_bytes(file), str(file)))
        except (ConfigError, ClashError, OSError):
            present[file] = None
    return present


def carry_out(plan: Plan, content: bytes, mode: int = PUBLIC) -> None:
    """Write the manifest and remove what it takes over; raises OSError."""
    write_atomically(plan.target, content, mode)
    for file in plan.remove:
        file.unlink(missing_ok=True)


def mode_for(written: Contents) -> int:
    """Give the permissions of a manifest's file."""
    return PRIVATE if written.has_secret else PUBLIC


def write_atomically(target: Path, content: bytes, mode: int = PUBLIC) -> None:
    """Write a file so that whoever looks sees the old content or the new, never a part; raises OSError."""
    # The node ignores hidden files, so it does not see this one grow.
    handle, name = tempfile.mkstemp(prefix=f".{target.name}.", dir=target.parent)
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        Path(name).chmod(mode)
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
