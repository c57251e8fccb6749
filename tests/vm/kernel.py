"""Debian's kernel for the virtual machine: fetched as a package once, and kept as the few files it takes.

The package is only unpacked, never installed. Of its thousands of modules those stay that the guest
needs; the order in which they load is worked out here, so that the guest needs no `modprobe`.
"""

import lzma
import shutil
import struct
import subprocess
import tempfile
import zlib
from dataclasses import dataclass
from pathlib import Path

CACHE = Path("~/.cache/pykubelet/vm").expanduser()
PACKAGE = "linux-image-amd64"

MODULES = (
    # libcrc32c asks for it by another name.
    "crc32c_generic",
    # The machine's root, and what is laid over it.
    *("virtio_pci", "9pnet_virtio", "9p", "overlay"),
    # A disk with I/O statistics.
    *("virtio_blk", "ext4"),
    # Something to swap to.
    "brd",
    # What container networks and iptables ask for.
    *("veth", "bridge", "nf_tables", "nft_compat", "nft_chain_nat", "nf_conntrack", "nf_nat"),
    *("xt_comment", "xt_MASQUERADE", "xt_addrtype", "xt_conntrack", "xt_mark", "xt_tcpudp", "xt_nat"),
    *("xt_multiport", "ip_tables", "iptable_nat", "iptable_filter", "iptable_mangle"),
    # kube-proxy and the network between two machines.
    *("xt_statistic", "xt_recent", "xt_nfacct", "nfnetlink_acct", "nf_conntrack_netlink", "br_netfilter"),
    *("ipt_REJECT", "ip6t_REJECT", "virtio_net"),
)


@dataclass(frozen=True, slots=True)
class Kernel:
    """A kernel that can be booted."""

    image: Path
    """Uncompressed: a processor in software is slow at undoing that."""
    modules: tuple[Path, ...]
    """In the order to load them."""
    config: Path
    """Its configuration, named as in /boot."""


def find_kernel(cache: Path = CACHE) -> Kernel:
    """Return the kernel, fetching it if this machine never did; raises RuntimeError with the remedy."""
    package = _package()
    folder = cache / f"{package}-{zlib.crc32(' '.join(MODULES).encode()):08x}"
    if not folder.is_dir():
        cache.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=cache) as scratch:
            _run("apt-get", "download", "-q", package, cwd=scratch)
            (archive,) = Path(scratch).glob("*.deb")
            _run("dpkg-deb", "-x", str(archive), f"{scratch}/all")
            made = Path(scratch) / "made"
            _reduce(Path(scratch) / "all", made)
            made.rename(folder)
    (config,) = folder.glob("config-*")
    return Kernel(folder / "vmlinux", tuple(sorted((folder / "modules").iterdir())), config)


def load_order(dependencies: str, wanted: tuple[str, ...]) -> list[str]:
    """Read `modules.dep` and return the paths of modules, each behind those it needs.

    Raises KeyError for one that does not exist.
    """
    needs: dict[str, list[str]] = {}
    paths: dict[str, str] = {}
    for line in dependencies.splitlines():
        path, _, rest = line.partition(":")
        needs[path] = rest.split()
        paths[Path(path).name.partition(".")[0].replace("-", "_")] = path
    order: dict[str, None] = {}

    def add(path: str) -> None:
        for other in needs[path]:
            add(other)
        order.setdefault(path)

    for name in wanted:
        add(paths[name.replace("-", "_")])
    return list(order)


def unpack_image(image: bytes) -> bytes:
    """Take the kernel itself out of a bootable file (boot protocol 2.08 or later, compressed with xz)."""
    sectors = image[0x1F1] or 4
    offset, length = struct.unpack_from("<II", image, 0x248)
    start = (sectors + 1) * 512 + offset
    # The last four bytes are the size, for the kernel's own use.
    return lzma.decompress(image[start : start + length - 4])


def _package() -> str:
    """Return the package behind Debian's name for the newest kernel of this release."""
    if shutil.which("apt-cache") is None:
        raise RuntimeError("the kernel comes from Debian's archive, and this machine has no apt")
    said = _run("apt-cache", "depends", PACKAGE)
    names = [line.split()[-1] for line in said.splitlines() if "Depends: linux-image-" in line]
    if not names:
        raise RuntimeError(f"apt does not know {PACKAGE}: run `apt-get update`")
    return names[0]


def _reduce(unpacked: Path, made: Path) -> None:
    (boot,) = (unpacked / "boot").glob("vmlinuz-*")
    version = boot.name.removeprefix("vmlinuz-")
    _run("busybox", "depmod", "-b", str(unpacked), version)
    (unpacked_modules,) = (unpacked / "lib/modules").iterdir()
    order = load_order((unpacked_modules / "modules.dep").read_text(), MODULES)
    (made / "modules").mkdir(parents=True)
    for number, path in enumerate(order):
        shutil.copy(unpacked_modules / path, made / "modules" / f"{number:03}-{Path(path).name}")
    shutil.copy(unpacked / "boot" / f"config-{version}", made)
    (made / "vmlinux").write_bytes(unpack_image(boot.read_bytes()))


def _run(*command: str, cwd: str | None = None) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=cwd)
    except subprocess.CalledProcessError as err:
        raise RuntimeError(f"{' '.join(command)}: {err.stderr.strip()[-500:]}") from err
    except FileNotFoundError as err:
        raise RuntimeError(f"{command[0]} is not on this machine: install it") from err
    return done.stdout
