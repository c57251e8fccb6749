"""Stopped manifests: hidden files beside the manifests, so that the file source does not read them.

`web.yaml` is stopped by renaming it to `.web.yaml.stopped`. The rename is atomic and survives a reboot: the
manifest is either there or stopped. A hidden file of the upstream kubelet is ignored, too.
"""

from __future__ import annotations

from pathlib import Path

SUFFIX = ".stopped"


def stopped_path(manifest: Path) -> Path:
    """Return the path of a manifest while it is stopped."""
    return manifest.with_name(f".{manifest.name}{SUFFIX}")


def started_path(stopped: Path) -> Path | None:
    """Return the path of a stopped manifest when it is started; None for any other file."""
    name = stopped.name
    if not name.startswith(".") or not name.endswith(SUFFIX) or len(name) <= len(SUFFIX) + 1:
        return None
    return stopped.with_name(name[1 : -len(SUFFIX)])


def stopped_manifests(directory: Path) -> dict[Path, Path]:
    """Return the stopped manifests of a directory: path when started, to its current path. Raises OSError."""
    found = {}
    for file in sorted(directory.iterdir()):
        manifest = started_path(file)
        if manifest is not None and file.is_file():
            found[manifest] = file
    return found
