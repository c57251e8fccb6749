"""One run of the virtual machine: boot, run a command in the guest, pass on its output and its exit code.

The processor is emulated in software (TCG), so it runs anywhere, also inside of virtual machines,
and slowly. The guest has no network. The machine ends with this process, whatever happens to it.
"""

import os
import shlex
import shutil
import subprocess
import sys
import tempfile
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

from tests.vm.initramfs import make_initramfs
from tests.vm.kernel import find_kernel

QEMU = "qemu-system-x86_64"
CHECKOUT = Path(__file__).parents[2]
MEMORY_MB = 2048
CPUS = 2
SECONDS = 2700.0
MONITOR = "PYKUBELET_VM_MONITOR"
"""Variable with the path of a QMP socket to be created, for `stop` and `cont`: a machine that is stopped
leaves the host to a measurement, and its clock stands still, too."""
MARKER = "PYKUBELET_VM"
"""Set where tests run in the guest, to the version of its cgroups."""
HIERARCHIES = {
    "v2": "systemd.unified_cgroup_hierarchy=1",
    "v1": "systemd.unified_cgroup_hierarchy=0 systemd.legacy_systemd_cgroup_controller=0",
}
"""How the kernel is told which cgroups systemd shall mount; v1 has systemd's own beside them, of v2."""
FIRST_WORD = "--- the guest runs its command"
LAST_WORD = "--- the guest's command ended with "
OWN_FOLDERS = ("/tmp", "/run", "/dev")
"""What the guest has for itself: of the host's it sees nothing there."""

_TARGET = """\
[Unit]
Description=The tests
Requires=vmtest.service
AllowIsolate=yes
"""

_SERVICE = """\
[Unit]
Description=The tests
DefaultDependencies=no
Wants=dbus.socket
After=dbus.socket
SuccessAction=poweroff-force
FailureAction=poweroff-force

[Service]
Type=oneshot
TimeoutStartSec=infinity
Delegate=yes
StandardOutput=file:/dev/ttyS1
StandardError=file:/dev/ttyS1
WorkingDirectory={checkout}
Environment={marker}={version} PYTHONDONTWRITEBYTECODE=1 HOME=/root
Environment=PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin
Environment=PYTHONPATH={modules}
{environment}
ExecStart=/bin/sh /etc/vmtest
"""

_SCRIPT = """\
stty -F /dev/ttyS1 raw
ip link set lo up
{network}
ip route add default via 10.99.0.1
{mounts}
echo "{first}"
{command}
echo "{last}$?"
"""
_LEADS_NOWHERE = """\
# A network that leads nowhere: an agent wants an address.
ip link add net0 type veth peer name net1
ip address add 10.99.0.2/24 dev net0
ip link set net0 up
ip link set net1 up"""
_LINKED = """\
ip address add {address}/24 dev eth0
ip link set eth0 up"""
_MOUNT_DISK = "mount /dev/vda /tmp && chmod 1777 /tmp"
_MOUNT_SHARE = "mkdir {point} && mount -t 9p -o trans=virtio,version=9p2000.L,msize=524288 share {point}"

# Units of the host that a guest without its disks and network has no use for.
_MASKED = (
    "systemd-timesyncd.service",
    "systemd-update-utmp.service",
    "systemd-random-seed.service",
    "systemd-pcrphase.service",
    "systemd-pcrphase-sysinit.service",
    "systemd-machine-id-commit.service",
    "systemd-sysusers.service",
    "systemd-firstboot.service",
    "systemd-journal-flush.service",
    "ldconfig.service",
    "systemd-hwdb-update.service",
    "systemd-update-done.service",
    "systemd-journal-catalog-update.service",
    "systemd-boot-system-token.service",
    "getty.target",
)


def why_not(checkout: Path = CHECKOUT) -> str:
    """Return the reason why the virtual machine cannot run here; empty when it can."""
    if hidden := [folder for folder in OWN_FOLDERS if checkout.resolve().is_relative_to(folder)]:
        return f"the guest has a {hidden[0]} of its own and would not see {checkout}: move it elsewhere"
    if os.uname().machine != "x86_64":
        return "the virtual machine is an x86_64 one, as its programs are this machine's"
    if shutil.which(QEMU) is None:
        return f"{QEMU} is missing (Debian package qemu-system-x86)"
    if not Path("/lib/systemd/systemd").exists():
        return "systemd is missing, which the guest takes from this machine (Debian package systemd)"
    if os.geteuid() != 0:
        return "root is needed: the guest reads this machine's files as root"
    return ""


@dataclass(frozen=True, slots=True)
class Link:
    """A network cable between two virtual machines; the one that listens is started first."""

    socket: Path
    """Unix socket of the host that carries the frames."""
    listens: bool
    address: str
    """The guest's IPv4 address, in 10.99.0.0/24."""

    def mac(self) -> str:
        """Return the MAC address of the guest's interface, which follows from its address."""
        return ":".join(["52", "54", *(f"{int(part):02x}" for part in self.address.split("."))])


@dataclass(frozen=True, slots=True)
class Equipment:
    """Equipment of the virtual machine beyond the host's files."""

    memory_mb: int = MEMORY_MB
    disk_mb: int = 0
    """Size of an ext4 disk with I/O statistics at the guest's /tmp; without one /tmp is in memory."""
    share: Path | None = None
    """Directory of the host that the guest can write to, at `SHARED`."""
    environment: Mapping[str, str] = field(default_factory=dict)
    """Environment of the command."""
    files: Mapping[str, str] = field(default_factory=dict)
    """Texts of files that differ from the host's, by path."""
    system: Path | None = None
    """ext4 image with another system than the host's files; what the guest writes is dropped with it."""
    link: Link | None = None
    """Network to another machine; without one, the guest's network leads nowhere."""


SHARED = Path("/run/host-share")
"""Mount point of `Equipment.share` in the guest."""


def run(
    arguments: Sequence[str], version: str = "v2", seconds: float = SECONDS, out: IO[str] = sys.stdout
) -> int:
    """Boot with these cgroups, run pytest with these arguments in the guest, and return its exit code.

    Raises RuntimeError when it does not get as far, with the end of the console.
    """
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", *arguments]
    return run_command(command, version, seconds, out)


def run_command(
    command: Sequence[str],
    version: str = "v2",
    seconds: float = SECONDS,
    out: IO[str] = sys.stdout,
    equipment: Equipment | None = None,
) -> int:
    """Boot with these cgroups, run a command in the guest, and return its exit code.

    Raises RuntimeError when it does not get as far, with the end of the console.
    """
    equipment = equipment or Equipment()
    if equipment.system is not None and equipment.disk_mb:
        raise ValueError("the guest has one disk: its own system, or an empty one")
    kernel = find_kernel()
    overlay = {
        "/etc/systemd/system/vmtest.target": _TARGET,
        "/etc/systemd/system/vmtest.service": _SERVICE.format(
            checkout="/" if equipment.system else CHECKOUT,
            modules=CHECKOUT / "src",
            marker=MARKER,
            version=version,
            environment="\n".join(unit_environment(equipment.environment)),
        ),
        "/etc/vmtest": guest_script(command, equipment),
        "/etc/fstab": "",
        f"/boot/{kernel.config.name}": kernel.config.read_text(),
        **equipment.files,
    }
    with tempfile.TemporaryDirectory(prefix="pyk-vm-") as folder:
        first_files = Path(folder) / "initramfs"
        first_files.write_bytes(make_initramfs(kernel, overlay, own_system=equipment.system is not None))
        console, disk = Path(folder) / "console.log", Path(folder) / "disk"
        if equipment.disk_mb:
            make_disk(disk, equipment.disk_mb)
        qemu = qemu_command(kernel.image, first_files, console, version, equipment, disk)
        with subprocess.Popen(
            ["setpriv", "--pdeathsig", "KILL", "--", *qemu],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
        ) as process:
            late = threading.Event()

            def end() -> None:
                late.set()
                process.kill()

            limit = threading.Timer(seconds, end)
            limit.start()
            try:
                code = _pass_on(process, out)
            finally:
                limit.cancel()
                process.kill()
        if code is None:
            tail = "\n".join(console.read_text(errors="replace").splitlines()[-40:])
            what = f"did not finish within {seconds:g}s" if late.is_set() else "ended before its command did"
            raise RuntimeError(f"the guest {what}; its console ends with\n{tail}")
    return code


def guest_script(command: Sequence[str], equipment: Equipment) -> str:
    """Return the shell script that the guest runs: network, mounts and the command."""
    mounts = [_MOUNT_DISK] if equipment.disk_mb else []
    if equipment.share is not None:
        mounts.append(_MOUNT_SHARE.format(point=SHARED))
    return _SCRIPT.format(
        first=FIRST_WORD,
        last=LAST_WORD,
        network=_LINKED.format(address=equipment.link.address) if equipment.link else _LEADS_NOWHERE,
        mounts="\n".join(mounts),
        command=shlex.join(command),
    )


def make_disk(path: Path, size_mb: int) -> None:
    """Create a sparse file with an empty ext4 file system. Raises RuntimeError with the remedy."""
    with path.open("wb") as file:
        file.truncate(size_mb << 20)
    try:
        subprocess.run(["mkfs.ext4", "-q", "-F", str(path)], check=True, capture_output=True, text=True)
    except FileNotFoundError:
        raise RuntimeError("mkfs.ext4 is needed (Debian package e2fsprogs)") from None
    except subprocess.CalledProcessError as err:
        raise RuntimeError(f"mkfs.ext4 failed: {err.stderr.strip()}") from err


def unit_environment(variables: Mapping[str, str]) -> list[str]:
    """Return lines of a unit that set variables; systemd expands % and unquotes backslashes."""
    quoted = str.maketrans({"\\": "\\\\", '"': '\\"', "%": "%%"})
    return [f'Environment="{name}={value.translate(quoted)}"' for name, value in variables.items()]


def qemu_command(
    image: Path,
    first_files: Path,
    console: Path,
    version: str = "v2",
    equipment: Equipment | None = None,
    disk: Path | None = None,
) -> list[str]:
    """Return the command that is the machine: its second serial port is the command's output."""
    equipment = equipment or Equipment()
    # Options are separated by commas: a comma in a path is doubled.
    drive = f"file={str(disk).replace(',', ',,')},format=raw,if=virtio,cache=unsafe"
    share = f"local,id=share,path={str(equipment.share).replace(',', ',,')},security_model=passthrough"
    system = f"file={str(equipment.system).replace(',', ',,')},format=raw,if=virtio,cache=unsafe,snapshot=on"
    masked = [f"systemd.mask={unit}" for unit in _MASKED]
    kernel_line = [
        f"console=ttyS0 panic=-1 loglevel=5 {HIERARCHIES[version]} hugepages=16 psi=1",
        "systemd.unit=vmtest.target systemd.show_status=0 systemd.log_target=console",
        # What makes a machine safe and watched costs time that an emulated one does not have.
        "mitigations=off init_on_alloc=0 random.trust_cpu=on audit=0 selinux=0 apparmor=0",
        # On a busy host the timer's interrupt is late, which the kernel takes for a broken IO-APIC.
        "tsc=reliable no_timer_check nowatchdog rcupdate.rcu_cpu_stall_suppress=1 net.ifnames=0",
        *masked,
    ]
    return [
        *(QEMU, "-accel", "tcg,thread=multi", "-cpu", "max,la57=off", "-machine", "q35"),
        *(
            "-smp",
            str(CPUS),
            "-m",
            str(equipment.memory_mb),
            "-nodefaults",
            "-no-user-config",
            "-display",
            "none",
        ),
        *("-no-reboot", "-kernel", str(image), "-initrd", str(first_files)),
        *("-append", " ".join(kernel_line)),
        *("-serial", f"file:{console}", "-serial", "stdio"),
        *(("-qmp", f"unix:{monitor},server=on,wait=off") if (monitor := os.environ.get(MONITOR)) else ()),
        *(_link_options(equipment.link) if equipment.link else ()),
        *("-fsdev", "local,id=host,path=/,security_model=passthrough,readonly=on,multidevs=remap"),
        *("-device", "virtio-9p-pci,fsdev=host,mount_tag=host"),
        *(("-drive", drive) if equipment.disk_mb else ()),
        *(("-drive", system) if equipment.system is not None else ()),
        *(
            ("-fsdev", share, "-device", "virtio-9p-pci,fsdev=share,mount_tag=share")
            if equipment.share is not None
            else ()
        ),
    ]


def _link_options(link: Link) -> tuple[str, ...]:
    server = "on" if link.listens else "off"
    path = str(link.socket).replace(",", ",,")
    return (
        *("-netdev", f"stream,id=link,server={server},addr.type=unix,addr.path={path}"),
        *("-device", f"virtio-net-pci,netdev=link,mac={link.mac()}"),
    )


def _pass_on(process: subprocess.Popen[str], out: IO[str]) -> int | None:
    assert process.stdout is not None
    code = None
    for line in process.stdout:
        if line.startswith(LAST_WORD):
            code = int(line.removeprefix(LAST_WORD))
        else:
            print(line.rstrip("\r\n"), file=out, flush=True)
    process.wait()
    return code
