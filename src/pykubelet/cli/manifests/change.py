"""`pykubelet rm`, `stop` and `start`: the file of an object is removed, hidden, or shown again.

A stopped manifest is a hidden file beside the others (`podconfig/stopped`), so it stays stopped across
restarts of the kubelet and of the host, until `pykubelet start` or `apply`.

`rm` keeps the data of claims, and prints where it is. With `--volumes` it waits until no pod has the volumes
mounted, and deletes them; a volume that a pod of another manifest uses is an error before anything is
removed.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterable, Sequence
from pathlib import Path

from pykubelet.cli.client import NodeError, SelectionError, run_command
from pykubelet.cli.manifests.apply import check_conflicts
from pykubelet.cli.manifests.inventory import (
    ManifestError,
    ManifestFile,
    find_file,
    find_objects,
    locked,
    read_directory,
    require_root,
    split_reference,
)
from pykubelet.cli.manifests.run import manifest_directory
from pykubelet.cli.node_access import Node, select_node
from pykubelet.cli.options import NodeSelection
from pykubelet.linux.mounts import has_mounts_inside, remove_tree
from pykubelet.podconfig.stopped import stopped_path
from pykubelet.volumes.local_claims import local_volume_path

REMOVE, STOP, START = "pykubelet rm", "pykubelet stop", "pykubelet start"
UNMOUNT_TIMEOUT_SECONDS = 90.0
"""Seconds to wait until no pod has a volume mounted."""
_POLL_SECONDS = 0.25


def run_remove(selection: NodeSelection, names: Sequence[str], *, volumes: bool) -> int:
    """Remove manifests; return the exit code."""

    def work() -> int:
        node = select_node(selection)
        directory = manifest_directory(node)
        claims: list[str] = []
        try:
            with locked(directory):
                files = read_directory(directory, node)
                chosen, orphans = _to_remove(files, names, directory, node, volumes=volumes)
                claims = [claim for file in chosen for found in file.objects for claim in found.claims]
                if volumes:
                    _check_unused(claims, [file for file in files if file not in chosen])
                for file in chosen:
                    file.current.unlink(missing_ok=True)
        except PermissionError as err:
            raise require_root(err) from err
        for file in chosen:
            for found in file.objects:
                print(f"{found.kind.lower()}/{found.name} removed")
            if not file.objects:
                print(f"{file.path.name} removed")
        present = [claim for claim in (*claims, *orphans) if _volume(node, claim).is_dir()]
        if volumes:
            _delete_volumes(node, present)
        else:
            for claim in present:
                print(f"The data of claim {claim} stays in {_volume(node, claim)}.", file=sys.stderr)
        return 0

    return run_command(REMOVE, work, ManifestError, OSError)


def _to_remove(
    files: Sequence[ManifestFile], names: Sequence[str], directory: Path, node: Node, *, volumes: bool
) -> tuple[list[ManifestFile], list[str]]:
    """Return the files to remove, and the claims without a manifest whose volumes are to be deleted."""
    chosen: list[ManifestFile] = []
    orphans: list[str] = []
    for name in names:
        try:
            file = find_file(files, name, directory)
        except SelectionError:
            claim = _orphaned_claim(name, node) if volumes else None
            if claim is None:
                raise
            orphans.append(claim)
            continue
        found = {item.key for _, item in find_objects([file], name)}
        others = [item.title for item in file.objects if item.key not in found]
        if found and others and Path(name).name != file.path.name:
            raise ManifestError(
                f"{name} is in {file.path} together with {', '.join(others)}: remove all of them with "
                f"`pykubelet rm {file.path.name}`, or edit the file"
            )
        if file not in chosen:
            chosen.append(file)
    return chosen, orphans


def _orphaned_claim(text: str, node: Node) -> str | None:
    kind, namespace, name = split_reference(text)
    claim = f"{namespace or 'default'}/{name}"
    if kind not in (None, "PersistentVolumeClaim"):
        return None
    try:
        return claim if _volume(node, claim).is_dir() else None
    except ValueError:
        return None


def _check_unused(claims: Sequence[str], others: Sequence[ManifestFile]) -> None:
    for file in others:
        for found in file.objects:
            for claim in found.used_claims:
                if claim in claims:
                    raise ManifestError(
                        f"the volume of claim {claim} is used by {found.title} in {file.path}: "
                        "remove that first, or leave out --volumes"
                    )


def _volume(node: Node, claim: str) -> Path:
    namespace, _, name = claim.partition("/")
    return local_volume_path(node.root_dir, namespace, name)


def _delete_volumes(node: Node, claims: Sequence[str]) -> None:
    deadline = time.monotonic() + UNMOUNT_TIMEOUT_SECONDS
    for claim in claims:
        while users := _users(node, claim):
            if time.monotonic() > deadline or not node.is_running():
                hint = "try again when it has ended" if node.is_running() else node.start_hint
                raise NodeError(
                    f"the volume of claim {claim} is still mounted by pod {', '.join(users)}: {hint}, then "
                    f"`pykubelet rm --volumes pvc/{claim}`"
                )
            time.sleep(_POLL_SECONDS)
        path = _volume(node, claim)
        remove_tree(path)
        print(f"volume {path} deleted")


def _users(node: Node, claim: str) -> list[str]:
    """Return the uids of the pods that have a volume mounted, or may still have."""
    namespace, _, name = claim.partition("/")
    mounts = node.root_dir.glob(f"pods/*/volumes/kubernetes.io~local-volume/{namespace}.{name}")
    users = [path.parents[2].name for path in mounts]
    return users or (["of another process"] if has_mounts_inside(_volume(node, claim)) else [])


def run_stop(selection: NodeSelection, names: Sequence[str]) -> int:
    """Stop the pods of manifests until they are started again; return the exit code."""

    def work() -> int:
        node = select_node(selection)
        directory = manifest_directory(node)
        try:
            with locked(directory):
                files = read_directory(directory, node)
                chosen = _unique(find_file(files, name, directory) for name in names)
                _rename_all(
                    [(file.path, stopped_path(file.path)) for file in chosen if file.stopped_at is None]
                )
        except PermissionError as err:
            raise require_root(err) from err
        for file in chosen:
            _report(file, "already stopped" if file.stopped_at is not None else "stopped")
        return 0

    return run_command(STOP, work, ManifestError, OSError)


def _rename_all(moves: Sequence[tuple[Path, Path]]) -> None:
    """Rename files, or none of them if one would replace another file. Raises ManifestError."""
    for source, target in moves:
        if target.exists() or target.is_symlink():
            raise ManifestError(
                f"cannot rename {source} to {target}: that file exists, too; move one of the two elsewhere"
            )
    for source, target in moves:
        source.rename(target)


def run_start(selection: NodeSelection, names: Sequence[str]) -> int:
    """Start stopped manifests; return the exit code."""

    def work() -> int:
        node = select_node(selection)
        directory = manifest_directory(node)
        try:
            with locked(directory):
                files = read_directory(directory, node)
                chosen = _unique(find_file(files, name, directory) for name in names)
                stopped = [file for file in chosen if file.stopped_at is not None]
                check_conflicts(stopped, [file for file in files if file.stopped_at is None])
                _rename_all([(file.stopped_at, file.path) for file in stopped if file.stopped_at is not None])
        except PermissionError as err:
            raise require_root(err) from err
        for file in chosen:
            _report(file, "started" if file.stopped_at is not None else "already started")
        if not node.is_running():
            print(f"The node is not running: {node.start_hint}.", file=sys.stderr)
        return 0

    return run_command(START, work, ManifestError, OSError)


def _unique(files: Iterable[ManifestFile]) -> list[ManifestFile]:
    return list({file.path: file for file in files}.values())


def _report(file: ManifestFile, what: str) -> None:
    for found in file.objects:
        print(f"{found.kind.lower()}/{found.name} {what}")
    if not file.objects:
        print(f"{file.path.name} {what}")
