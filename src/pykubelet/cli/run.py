"""`pykubelet run FILE`: gives the node a pod."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

from pykubelet.cli.complain import complain
from pykubelet.config.errors import ConfigError
from pykubelet.embedded.errors import EmbeddedError
from pykubelet.embedded.instance import Instance
from pykubelet.embedded.lock import holder
from pykubelet.pods.manifests import read_manifest

PROGRAM = "pykubelet run"


def run_manifest(file: Path, data_dir: Path) -> int:
    """Check the manifest and put it into the manifests folder; returns the exit code."""
    try:
        instance = Instance.at(data_dir)
        content = file.read_bytes()
        pods = read_manifest(content, str(file))
    except (ConfigError, EmbeddedError) as err:
        return complain(PROGRAM, err)
    except OSError as err:
        return complain(PROGRAM, f"{file} cannot be read: {err.strerror}")
    if not instance.manifests.is_dir():
        return complain(PROGRAM, f"there is no node in {data_dir}: start one with `pykubelet up`")
    target = instance.manifests / file.name
    try:
        _write_atomically(target, content)
    except OSError as err:
        return complain(PROGRAM, f"{target} cannot be written: {err.strerror}")
    for pod in pods:
        print(f"{pod.metadata.name}: handed to the node as {target}")
    if holder(instance) is None:
        print("The node is not running: the pod starts with the next `pykubelet up`.")
    return 0


def _write_atomically(target: Path, content: bytes) -> None:
    handle, name = tempfile.mkstemp(prefix=".", dir=target.parent)
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
