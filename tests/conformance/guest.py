"""Passes of the suite in the virtual machine of `tests.vm`.

The statistics specs need what this host may not have: cgroups for the kubelet and for the runtime, block I/O
statistics of containers, and pressure information. The guest has systemd, cgroup v2 and a virtio disk. It
runs `python -m tests.conformance` itself, and writes its report and logs to a directory that it shares with
the host. Nothing else of a run remains.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from pathlib import Path

from tests.conformance.report import SuiteError
from tests.conformance.rig import IN_NAMESPACE
from tests.vm.machine import MARKER, SHARED, Equipment, run_command

MEMORY_MB = 4096
DISK_MB = 8192
SECONDS = 18000.0
"""Time limit of the virtual machine: everything takes about ten times as long as on the host."""
_PASSED_ON = ("AGENT", "FOCUS", "SKIP", "RUNTIME", "KUBEBUILDER_ASSETS", "XDG_CACHE_HOME")
_NAME_SERVER = "nameserver 10.99.0.2\n"
"""The guest's own address: look-ups of pods fail immediately instead of after timeouts."""
_KNOWN_CODES = (0, 1)
"""Exit codes of a run whose report is complete."""


def in_guest(environ: Mapping[str, str] = os.environ) -> bool:
    """Return whether this process runs in the virtual machine."""
    return bool(environ.get(MARKER))


def guest_equipment(results: Path, environ: Mapping[str, str]) -> Equipment:
    """Return the virtual machine for a run whose results are shared at `results`."""
    variables = {name: environ[name] for name in _PASSED_ON if name in environ}
    return Equipment(
        memory_mb=MEMORY_MB,
        disk_mb=DISK_MB,
        share=results,
        # All mounts of the guest are the run's own.
        environment={
            **variables,
            "PASS": environ.get("PASS") or "vm",
            "RESULTS": str(SHARED),
            IN_NAMESPACE: "1",
        },
        files={"/etc/resolv.conf": _NAME_SERVER},
    )


def run_in_guest(results: Path, environ: Mapping[str, str] = os.environ) -> None:
    """Boot the virtual machine and run its pass; its report and logs are in `results`.

    Raises SuiteError when the guest did not run the suite to its end.
    """
    results.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, "-m", "tests.conformance"]
    try:
        code = run_command(
            command, seconds=SECONDS, out=sys.stderr, equipment=guest_equipment(results, environ)
        )
    except RuntimeError as err:
        raise SuiteError(f"the virtual machine failed: {err}") from err
    if code not in _KNOWN_CODES:
        raise SuiteError(
            f"the suite in the virtual machine ended with {code}: see its output above, and {results}"
        )
