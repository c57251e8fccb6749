"""`python -m tests.kubeadm [ARGUMENTS]`: a cluster of two virtual machines, made by an unmodified kubeadm.

The first guest runs the tests in `guest/`, with pytest's ARGUMENTS, and commands the second one by files in
the directory that all share, `RESULTS` (/tmp/pykubelet-kubeadm), where the logs remain. `PACKAGE` is the
kubelet's Debian package to be tested; without it the checkout's kubelet is installed by hand.
Exits as pytest did, with 3 when the machines cannot run here, with 4 when one failed.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from pykubelet.devcluster.layout import NotAvailable
from tests.kubeadm.guest.node import PACKAGE
from tests.kubeadm.images import IMAGE_ERRORS, needed_names, pack_images
from tests.kubeadm.programs import Programs, find_programs
from tests.kubeadm.settings import (
    CONTROL,
    IMAGES,
    INDEX,
    PROGRAMS,
    ROLE,
    WORKER,
    Member,
    containerd_configuration,
)
from tests.vm.machine import Equipment, Link, run_command, why_not

RESULTS = Path("/tmp/pykubelet-kubeadm")
SECONDS = 3 * 3600.0
"""Time limit of the machines."""
MEMORY_MB = {CONTROL: 4096, WORKER: 3072}
DISK_MB = 8192
LINK = "link"
"""Name of the machines' socket in the shared directory."""
_END_SECONDS = 60.0
_HOSTS = "127.0.0.1 localhost\n" + "".join(
    f"{member.address} {member.name}\n" for member in (CONTROL, WORKER)
)


def main() -> int:
    """Entry point; returns the exit code."""
    # So that the machines end and what was made is removed, whoever ends this.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    if reason := why_not():
        return _fail(reason, 3)
    results = Path(os.environ.get("RESULTS") or RESULTS)
    arguments = sys.argv[1:]
    try:
        programs = find_programs(_say)
        if arguments == [WORKER.name]:
            return _run_worker(programs, results)
        _fill_share(programs, results)
        with _worker_process(results):
            command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-n0", "-s"]
            command += arguments or ["-q", "--confcutdir=tests/kubeadm", "tests/kubeadm/guest"]
            return run_command(command, seconds=SECONDS, equipment=_equipment(CONTROL, programs, results))
    except (NotAvailable, *IMAGE_ERRORS) as err:
        return _fail(str(err), 3)
    except RuntimeError as err:
        return _fail(str(err), 4)


def _fill_share(programs: Programs, results: Path) -> None:
    """Make the shared directory with the images that kubeadm names, and the package."""
    if results.exists():
        shutil.rmtree(results)
    results.mkdir(parents=True)
    version, names = needed_names(programs.kubeadm)
    _say(f"Packing the images of {version}")
    packed = pack_images(programs, names, results / IMAGES)
    (results / IMAGES / INDEX).write_text(json.dumps({image.file: image.names for image in packed}))
    if package := os.environ.get("PACKAGE"):
        shutil.copy(package, results / PACKAGE)


def _equipment(member: Member, programs: Programs, results: Path) -> Equipment:
    index = json.loads((results / IMAGES / INDEX).read_text())
    pause = next(name for names in index.values() for name in names if "/pause:" in name)
    return Equipment(
        memory_mb=MEMORY_MB[member],
        disk_mb=DISK_MB,
        share=results,
        environment={ROLE: member.name, PROGRAMS: f"{programs.kubeadm.parent}:{programs.kubectl.parent}"},
        files={
            "/etc/hostname": f"{member.name}\n",
            "/etc/hosts": _HOSTS,
            # No server: names outside of the cluster do not resolve.
            "/etc/resolv.conf": "nameserver 10.99.0.1\n",
            "/etc/containerd/config.toml": containerd_configuration(pause),
        },
        link=Link(results / LINK, listens=member == CONTROL, address=member.address),
    )


@contextlib.contextmanager
def _worker_process(results: Path) -> Iterator[None]:
    """Run the worker's machine in a process of its own, which ends with this block."""
    command = [sys.executable, "-m", "tests.kubeadm", WORKER.name]
    with subprocess.Popen(
        ["setpriv", "--pdeathsig", "TERM", "--", *command],
        env={**os.environ, "RESULTS": str(results)},
        stdin=subprocess.DEVNULL,
        # The kernel shares processor time between sessions: each machine has its own share.
        start_new_session=True,
    ) as process:
        try:
            yield
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(_END_SECONDS)
        finally:
            process.terminate()


def _run_worker(programs: Programs, results: Path) -> int:
    while not (results / LINK).exists():  # the machine that listens is first
        time.sleep(0.1)
    command = [sys.executable, "-m", "tests.kubeadm.guest.worker"]
    return run_command(command, seconds=SECONDS, equipment=_equipment(WORKER, programs, results))


def _say(text: str) -> None:
    print(f"kubeadm: {text}", file=sys.stderr, flush=True)


def _fail(text: str, code: int) -> int:
    _say(text)
    return code


if __name__ == "__main__":
    sys.exit(main())
