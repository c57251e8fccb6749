"""The reference kubelet, run beside ours to compare: what it leaves behind must go."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

from pykubelet.linux.kernel import KERNEL_DEFAULTS

_SYSCTLS = [Path("/proc/sys", name) for name in KERNEL_DEFAULTS]
"""What it sets to its liking when it starts."""
_ROOT = Path("/var/lib/kubelet")
"""Its socket for device plugins is here, wherever its root directory is."""
_LINKS = Path("/var/log/containers")


@contextlib.contextmanager
def reference_traces() -> Iterator[None]:
    """Take back what a reference kubelet makes and sets of the machine during the block."""
    before, links = _ROOT.exists(), set(_LINKS.glob("*"))
    settings = {path: path.read_text() for path in _SYSCTLS if path.exists()}
    try:
        yield
    finally:
        for path, value in settings.items():
            if path.read_text() != value:
                path.write_text(value)
        for link in set(_LINKS.glob("*")) - links:
            if not link.exists():  # what it points to is gone
                link.unlink(missing_ok=True)
        if not before:
            (_ROOT / "device-plugins/kubelet.sock").unlink(missing_ok=True)
            for folder in (_ROOT / "device-plugins", _ROOT):
                with contextlib.suppress(OSError):  # somebody else uses it
                    folder.rmdir()
