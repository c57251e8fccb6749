"""Mounts that appear in containers while they run, and the other way round.

A volume with `mountPropagation` shares what is mounted in it between node and container; the runtime
refuses it unless the agent's root lies on a shared mount. On most machines everything does. On others
the root is bound onto itself and made shared, which is what the reference kubelet does, too: one that
takes the node over later finds it done. Doing it late would hide what is mounted below already.
"""

import os
from pathlib import Path

from pykubelet.host.mounts import Mount, mount, mounts_below, read_mounts, unmount

MS_BIND = 0x1000
MS_REC = 0x4000
MS_SHARED = 0x100000


def share_mounts(folder: Path) -> bool:
    """Have mounts below a folder be shared; gives whether the folder had to become a mount for that.

    A folder in which something is mounted already stays as it is. Raises OSError.
    """
    real = folder.resolve()
    if _mount_of(real).shared or mounts_below(read_mounts(real), real):
        return False
    mount(str(real), real, "", flags=MS_BIND)
    mount("", real, "", flags=MS_SHARED | MS_REC)
    return True


def unshare_mounts(folder: Path) -> None:
    """Take back what `share_mounts` did, unless something is mounted in the folder; raises OSError."""
    real = folder.resolve()
    mounts = read_mounts(real)
    if any(one.point == real for one in mounts) and not mounts_below(mounts, real):
        unmount(real)


def is_shared(folder: Path) -> bool:
    """Whether a folder lies on a shared mount; raises OSError."""
    return _mount_of(folder.resolve()).shared


def _mount_of(real: Path) -> Mount:
    """Give the mount on which a folder lies."""
    opened = os.open(real, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        facts = Path(f"/proc/self/fdinfo/{opened}").read_text().split()
    finally:
        os.close(opened)
    number = int(facts[facts.index("mnt_id:") + 1])
    return next(one for one in read_mounts() if one.id == number)
