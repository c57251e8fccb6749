"""Manifests for tests: short to write, and quick to stop."""

from typing import Any

from pykubelet.standalone.seed_images import BUSYBOX_IMAGE

Document = dict[str, Any]


IMAGE = BUSYBOX_IMAGE


def forever(script: str = ":") -> list[str]:
    """A command that does something and then waits, but ends at once when it is asked to."""
    return ["sh", "-c", f"trap 'exit 0' TERM; {script}; while :; do sleep 3600 & wait $!; done"]


def container(name: str = "main", command: list[str] | None = None, **fields: Any) -> Document:
    """A container that waits by default."""
    return {"name": name, "image": IMAGE, "command": command or forever(), **fields}


def pod(name: str, *containers: Document, meta: Document | None = None, **spec: Any) -> Document:
    """A pod of these containers, or of one that waits."""
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": name, **(meta or {})},
        "spec": {"terminationGracePeriodSeconds": 5, "containers": list(containers) or [container()], **spec},
    }
