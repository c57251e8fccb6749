"""Manifests for tests: short to write, and quick to stop."""

import shutil
import subprocess
from typing import Any

from pykubelet.embedded.seed_images import BUSYBOX_REPOSITORY, busybox_version

Document = dict[str, Any]


def _image() -> str:
    program = shutil.which("busybox")
    if program is None:
        return f"{BUSYBOX_REPOSITORY}:absent"
    about = subprocess.run([program], capture_output=True, text=True, check=False)
    return f"{BUSYBOX_REPOSITORY}:{busybox_version(about.stdout or about.stderr)}"


IMAGE = _image()
"""The image that every private runtime has, named after the machine's busybox."""


def forever(script: str = ":") -> list[str]:
    """A command that does something and then waits, but ends at once when it is asked to."""
    return ["sh", "-c", f"trap 'exit 0' TERM; {script}; while :; do sleep 3600 & wait $!; done"]


def container(name: str = "main", command: list[str] | None = None, **fields: Any) -> Document:
    """A container that waits unless it is told otherwise."""
    return {"name": name, "image": IMAGE, "command": command or forever(), **fields}


def pod(name: str, *containers: Document, meta: Document | None = None, **spec: Any) -> Document:
    """A pod of these containers, or of one that waits."""
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": name, **(meta or {})},
        "spec": {"terminationGracePeriodSeconds": 5, "containers": list(containers) or [container()], **spec},
    }
