"""The first files of the virtual machine: an archive that the kernel unpacks into memory.

It holds busybox, the kernel's modules and a script that puts the root together: this machine's own
files, read-only, with a layer in memory above them. So the guest has what the host has (Python, the
checkout, containerd, systemd), can write anywhere, and leaves nothing behind.
"""

import shutil
import stat
from collections.abc import Iterable, Mapping
from pathlib import Path

from tests.vm.kernel import Kernel

_FIELDS = 13

_INIT = """\
#!/bin/busybox sh
set -e
/bin/busybox --install -s /bin
mount -t proc none /proc
mount -t sysfs none /sys
for module in /modules/*; do insmod $module || echo "no $module"; done
{root}
# What this machine has mounted or running must not be taken for the guest's own.
for place in /proc /sys /dev /run /tmp /var/tmp /var/lib/cni /sys/fs/cgroup; do mkdir -p /root$place; done
mount -t tmpfs -o mode=755 none /root/run
mount -t tmpfs -o mode=1777,size=60% none /root/tmp
mount -t tmpfs -o mode=755 none /root/var/lib/cni
mount -t devtmpfs none /root/dev
mount --move /proc /root/proc
mount --move /sys /root/sys
cp -r /overlay/. /root/
# With it systemd would take itself to be in a container.
rm -f /root/.dockerenv
exec switch_root /root /lib/systemd/systemd
"""


_HOST_FILES = """\
mount -t 9p -o ro,trans=virtio,version=9p2000.L,msize=524288,cache=loose host /lower
mount -t tmpfs -o mode=755,size=70% none /layer
mkdir /layer/upper /layer/work
mount -t overlay -o lowerdir=/lower,upperdir=/layer/upper,workdir=/layer/work none /root"""
_OWN_SYSTEM = """\
mount -t devtmpfs none /dev
mount -t ext4 /dev/vda /root"""


def make_initramfs(kernel: Kernel, overlay: Mapping[str, str], *, own_system: bool = False) -> bytes:
    """Make the archive; `overlay` are texts of files that the guest finds beside the root's, by path.

    The root is the host's files, or with `own_system` the guest's first disk.
    """
    busybox = shutil.which("busybox")
    if busybox is None:
        raise RuntimeError("busybox is needed (Debian package busybox-static)")
    init = _INIT.replace("{root}", _OWN_SYSTEM if own_system else _HOST_FILES)
    files: dict[str, bytes] = {"bin/busybox": Path(busybox).read_bytes(), "init": init.encode()}
    files |= {f"modules/{path.name}": path.read_bytes() for path in kernel.modules}
    files |= {f"overlay/{path.lstrip('/')}": text.encode() for path, text in overlay.items()}
    folders = {"proc", "sys", "lower", "layer", "root", "dev"}
    return archive(files, folders, executable={"bin/busybox", "init"})


def archive(files: Mapping[str, bytes], folders: Iterable[str], executable: Iterable[str] = ()) -> bytes:
    """Write files and directories (and those they lie in) in cpio's "newc" form; all are root's."""
    above = {str(parent) for path in files for parent in Path(path).parents if str(parent) != "."}
    parts = [
        *(_entry(path, stat.S_IFDIR | 0o755, b"") for path in sorted(above | set(folders))),
        *(
            _entry(path, stat.S_IFREG | (0o755 if path in executable else 0o644), data)
            for path, data in files.items()
        ),
        _entry("TRAILER!!!", 0, b""),
    ]
    return b"".join(parts)


def _entry(path: str, mode: int, data: bytes) -> bytes:
    name = path.encode() + b"\0"
    # In this order: inode, mode, uid, gid, links, time, size, four device numbers, the name's size, checksum.
    numbers = [0, mode, 0, 0, 1, 0, len(data), 0, 0, 0, 0, len(name), 0]
    assert len(numbers) == _FIELDS
    head = b"070701" + b"".join(b"%08X" % number for number in numbers)
    return _padded(head + name) + _padded(data)


def _padded(data: bytes) -> bytes:
    return data + bytes(-len(data) % 4)
