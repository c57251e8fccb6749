"""Whether files that are meant to be in memory only can be kept from the disk.

Secrets are on tmpfs, and a kernel that swaps writes tmpfs to disk unless the mount says `noswap`, which
kernels before 6.4 do not know (some distributions' do) and user namespaces may not say.
"""

import tempfile
from pathlib import Path

from pykubelet.host.mounts import mount, unmount


def can_refuse_swap(folder: Path) -> bool:
    """Find out by a mount below `folder`, which is taken away again. Blocks."""
    try:
        with tempfile.TemporaryDirectory(prefix="tmpfs-noswap-", dir=folder) as place:
            mount("tmpfs", Path(place), "tmpfs", "noswap")
            unmount(Path(place), detach=True)
    except OSError:
        return False
    return True
