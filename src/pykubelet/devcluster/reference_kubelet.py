"""Cleanup after an upstream kubelet that runs on this host for comparison."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

from pykubelet.linux.kernel import KERNEL_DEFAULTS

_SYSCTLS = [Path("/proc/sys", name) for name in KERNEL_DEFAULTS]
"""Sysctls that the upstream kubelet sets when it starts."""
_ROOT = Path("/var/lib/kubelet")
"""Directory of its device plugin socket, which does not depend on its root directory."""
_LINKS = Path("/var/log/containers")


@contextlib.contextmanager
def undo_host_changes() -> Iterator[None]:
    """Undo the changes that an upstream kubelet makes to the host during the block."""
    before, links = _ROOT.exists(), set(_LINKS.glob("*"))
    settings = {path: path.read_text() for path in _SYSCTLS if path.exists()}
    try:
        yield
    finally:
        for path, value in settings.items():
            if path.read_text() != value:
                path.write_text(value)
        for link in set(_LINKS.glob("*")) - links:
            if not link.exists():  # its target no longer exists
                link.unlink(missing_ok=True)
        if not before:
            (_ROOT / "device-plugins/kubelet.sock").unlink(missing_ok=True)
            for directory in (_ROOT / "device-plugins", _ROOT):
                with contextlib.suppress(OSError):  # another process uses it
                    directory.rmdir()
