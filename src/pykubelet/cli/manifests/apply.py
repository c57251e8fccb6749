"""`pykubelet apply`: puts manifests into the manifest directory and reports what changed, per object.

The unit is a file. A manifest whose objects are in a file of the directory replaces that file, under the name
that it has there, because a new name would restart its pods; a manifest without a file keeps its own name. A
conflict names the other file, and `--prune` is required to remove an object that the new manifest does not
have. All sources are read, validated and compared with the directory before the first file is written. A
stopped manifest that is applied is started.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from pykubelet.cli.client import run_command
from pykubelet.cli.manifests.inventory import (
    SUFFIXES,
    ManifestError,
    ManifestFile,
    ManifestObject,
    locked,
    read_content,
    read_directory,
    require_root,
)
from pykubelet.cli.manifests.run import manifest_directory
from pykubelet.cli.node_access import Node, select_node
from pykubelet.cli.options import NodeSelection
from pykubelet.cli.printers import escape_unprintable
from pykubelet.config.errors import ConfigError, Problem
from pykubelet.podconfig.manifests import MAX_BYTES, bounded, read_bytes
from pykubelet.podconfig.static_pods import PRIVATE, PUBLIC, InstallationPlan, install_manifest

PROGRAM = "pykubelet apply"
Change = Literal["created", "configured", "unchanged", "started", "pruned"]
MAX_FILES = 1000
"""Manifests of a directory that are applied at once."""
URL_TIMEOUT_SECONDS = 30.0
_MAX_SENT_CHARACTERS = 200
_KINDS_WITH_SECRETS = frozenset({"Secret"})


@dataclass(frozen=True, slots=True)
class Source:
    """A manifest to apply: its content, its origin for messages, and its file name, if it has one."""

    content: bytes
    origin: str
    name: str = ""


@dataclass(frozen=True, slots=True)
class FileChange:
    """What happens to one file."""

    file: ManifestFile
    changes: tuple[tuple[ManifestObject, Change], ...]
    remove: tuple[Path, ...] = ()
    """Other files whose objects it takes over."""

    @property
    def is_needed(self) -> bool:
        """Whether the file has to be written."""
        return bool(self.remove) or any(change != "unchanged" for _, change in self.changes)


def plan_apply(
    new: Sequence[ManifestFile], present: Sequence[ManifestFile], *, prune: bool
) -> list[FileChange]:
    """Return the changes of the directory; `new` have provisional paths. Raises ManifestError."""
    planned: list[FileChange] = []
    owners: dict[tuple[str, str, str], str] = {}
    for file in new:
        for found in file.objects:
            if found.key in owners:
                raise ManifestError(
                    f"{found.title} is in {owners[found.key]} and in {file.path.name}: rename one"
                )
            owners[found.key] = file.path.name
        planned.append(_plan_file(file, present, prune=prune))
    targets = [change.file.path for change in planned]
    for target in targets:
        if targets.count(target) > 1:
            raise ManifestError(f"two manifests would become {target}: join them into one file")
    replaced = {change.file.path for change in planned}
    removed = {path for change in planned for path in change.remove}
    others = [old for old in present if old.path not in replaced and old.current not in removed]
    _check_pod_names([*(change.file for change in planned), *others])
    return planned


def check_conflicts(started: Sequence[ManifestFile], running: Sequence[ManifestFile]) -> None:
    """Raise ManifestError if stopped manifests cannot be started beside the running ones."""
    owners: dict[tuple[str, str, str], ManifestFile] = {}
    for file in (*running, *started):
        for found in file.objects:
            if found.key in owners and file in started:
                raise ManifestError(
                    f"{found.title} is in {file.path.name} and in {owners[found.key].path.name}: remove one"
                )
            owners[found.key] = file
    _check_pod_names([*running, *(replace(file, stopped_at=None) for file in started)])


def _plan_file(file: ManifestFile, present: Sequence[ManifestFile], *, prune: bool) -> FileChange:
    overlapping = [old for old in present if old.keys & file.keys]
    same_name = next((old for old in present if old.path == file.path), None)
    for old in overlapping:
        others = sorted(found.title for found in old.objects if found.key not in file.keys)
        if others and not (prune and old is same_name):
            shared = next(found.title for found in old.objects if found.key in file.keys)
            remedy = (
                "say --prune to remove what yours does not have"
                if old is same_name
                else "take it out there, or rename yours"
            )
            raise ManifestError(f"{shared} is in {old.path} together with {', '.join(others)}: {remedy}")
    target = file
    if overlapping:
        kept = same_name if same_name in overlapping else overlapping[0]
        assert kept is not None
        target = ManifestFile(kept.path, file.content, file.objects)
    elif same_name is not None:
        holds = ", ".join(found.title for found in same_name.objects) or "what cannot be read"
        if same_name.objects or same_name.problems:
            raise ManifestError(f"{file.path} is there already and holds {holds}: rename your file")
    old_objects = {found.key: (found, old) for old in overlapping for found in old.objects}
    changes: list[tuple[ManifestObject, Change]] = []
    for found in file.objects:
        known = old_objects.get(found.key)
        if known is None:
            changes.append((found, "created"))
        elif known[0].document != found.document:
            changes.append((found, "configured"))
        else:
            changes.append((found, "started" if known[1].stopped_at is not None else "unchanged"))
    changes += [(found, "pruned") for key, (found, _) in old_objects.items() if key not in file.keys]
    remove = tuple(old.current for old in overlapping if old.path != target.path)
    return FileChange(target, tuple(changes), remove)


def _check_pod_names(files: Sequence[ManifestFile]) -> None:
    """Raise ManifestError if two objects would run pods of the same name."""
    owners: dict[str, tuple[ManifestFile, ManifestObject]] = {}
    for file in files:
        if file.stopped_at is not None:
            continue
        for found in file.objects:
            for pod in found.pods:
                if pod in owners:
                    other_file, other = owners[pod]
                    raise ManifestError(
                        f"{found.title} in {file.path.name} and {other.title} in {other_file.path.name} "
                        f"would both run pod {pod}: rename one"
                    )
                owners[pod] = file, found


def run_apply(selection: NodeSelection, sources: Sequence[str], *, prune: bool = False) -> int:
    """Apply manifests; return the exit code."""

    def work() -> int:
        node = select_node(selection)
        directory = manifest_directory(node)
        new = _validated([source for text in sources for source in read_sources(text)], directory, node)
        try:
            with locked(directory):
                planned = plan_apply(new, read_directory(directory, node), prune=prune)
                for change in planned:
                    if change.is_needed:
                        _write(change)
        except PermissionError as err:
            raise require_root(err) from err
        for change in planned:
            for found, what in change.changes:
                print(f"{found.reference} {what}")
        if not node.is_running():
            print(f"The node is not running: {node.start_hint}.", file=sys.stderr)
        return 0

    return run_command(PROGRAM, work, ManifestError, OSError)


def _validated(sources: Sequence[Source], directory: Path, node: Node) -> list[ManifestFile]:
    """Return the validated manifests. Raises ConfigError with the problems of all of them."""
    files, problems, warnings = [], [], []
    for source in sources:
        path = directory / (source.name or "manifest.yaml")
        try:
            file, found = read_content(source.content, path, source.origin, node)
        except ConfigError as err:
            problems += err.problems
            continue
        if not source.name:
            first = file.objects[0]
            prefix = "" if first.namespace == "default" else f"{first.namespace}-"
            path = directory / f"{first.kind.lower()}-{prefix}{first.name}.yaml"
            file = ManifestFile(path, file.content, file.objects)
        files.append(file)
        warnings += [f"{source.origin}: {warning}" for warning in found]
    if problems:
        raise ConfigError(problems)
    for warning in warnings:
        print(f"{PROGRAM}: warning: {escape_unprintable(warning, lines=False)}", file=sys.stderr)
    return files


def _write(change: FileChange) -> None:
    file = change.file
    has_secret = any(found.kind in _KINDS_WITH_SECRETS for found in file.objects)
    plan = InstallationPlan(file.path, change.remove)
    install_manifest(plan, file.content, PRIVATE if has_secret else PUBLIC)


def read_sources(text: str) -> list[Source]:
    """Return the manifests of a file, a directory, `-` or a URL. Raises ManifestError, ConfigError."""
    if text == "-":
        return [Source(bounded(sys.stdin.buffer.read(MAX_BYTES + 1), "standard input"), "standard input")]
    if text.startswith(("http://", "https://")):
        return [_fetch(text)]
    path = Path(text)
    if path.is_dir():
        files = sorted(file for file in path.iterdir() if file.suffix in SUFFIXES and file.is_file())
        files = [file for file in files if not file.name.startswith(".")]
        if not files:
            raise ManifestError(f"{path} has no manifests: their names end with {', '.join(SUFFIXES)}")
        if len(files) > MAX_FILES:
            raise ManifestError(f"{path} has {len(files)} manifests, but at most {MAX_FILES} can be applied")
        return [_read(file) for file in files]
    return [_read(path)]


def _read(path: Path) -> Source:
    if path.name.startswith("."):
        raise ManifestError(f"{path.name} is a hidden file, which the node ignores: rename it")
    try:
        return Source(read_bytes(path), str(path), path.name)
    except OSError as err:
        raise ManifestError(f"{path} cannot be read: {err.strerror or err}") from err


def _brief(sent: object) -> str:
    """Return what a server sent as one short line."""
    return " ".join(str(sent).split())[:_MAX_SENT_CHARACTERS]


def _fetch(url: str) -> Source:
    # Imported here: files need none of it.
    import http.client
    import urllib.error
    import urllib.parse
    import urllib.request

    try:
        with urllib.request.urlopen(url, timeout=URL_TIMEOUT_SECONDS) as response:  # noqa: S310
            content = response.read(MAX_BYTES + 1)
            missing = response.length if len(content) <= MAX_BYTES else 0
    except urllib.error.HTTPError as err:
        raise ManifestError(
            f"{url} cannot be fetched: the server sent {err.code} {_brief(err.reason)}"
        ) from err
    except (OSError, ValueError, http.client.InvalidURL) as err:
        reason = getattr(err, "reason", err)
        raise ManifestError(f"{url} cannot be fetched: {reason}") from err
    except http.client.HTTPException as err:
        reason = f"{type(err).__name__}: {_brief(err)}"
        raise ManifestError(f"{url} cannot be fetched: it is not a valid HTTP response ({reason})") from err
    if missing:
        # `read` with a size returns what it got.
        raise ManifestError(f"{url} cannot be fetched: the response ended {missing} bytes early; try again")
    name = Path(urllib.parse.unquote(urllib.parse.urlsplit(url).path)).name
    usable = name.endswith(SUFFIXES) and not name.startswith(".") and name.isprintable() and len(name) < 200
    try:
        return Source(bounded(content, url), url, name if usable else "")
    except ConfigError as err:
        raise ConfigError([Problem(url, problem.message) for problem in err.problems]) from None
