"""A private container runtime in a process of its own."""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from pykubelet.standalone.instance import Instance, MissingPrograms
from pykubelet.standalone.requirements import inspect_host


@dataclass(frozen=True, slots=True)
class RunningRuntime:
    """A private runtime in a process of its own."""

    instance: Instance
    endpoint: str
    pause_image: str
    busybox_image: str
    pid: int
    """The process that keeps containerd alive."""


def why_no_machine() -> str:
    """Return the reason why real containers cannot run here; empty when they can."""
    if os.geteuid() != 0:
        return "root is needed to run containers"
    try:
        inspect_host()
    except MissingPrograms as err:
        return str(err)
    return ""


@contextmanager
def runtime_process(
    data_dir: Path,
    cgroup_driver: str = "cgroupfs",
    *,
    inside: Sequence[str] = (),
    env: Mapping[str, str] | None = None,
) -> Iterator[RunningRuntime]:
    """Run a private runtime in a process of its own, which ends with this block or with this process.

    `inside` is the prefix of its command, such as one that enters a network namespace; `env` are variables
    in addition to this process's, such as the PATH of another containerd.
    """
    command = [
        *inside,
        "setpriv",
        "--pdeathsig",
        "TERM",
        "--",
        sys.executable,
        "-m",
        "pykubelet.standalone",
        str(data_dir),
        cgroup_driver,
    ]
    with (
        tempfile.TemporaryFile("w+") as said,
        subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=said, text=True, env={**os.environ, **(env or {})}
        ) as process,
    ):
        try:
            assert process.stdout is not None
            word, _, names = process.stdout.readline().partition(" ")
            if word != "ready":
                process.wait(timeout=60)
                said.seek(0)
                pytest.fail(f"the private runtime does not start: {said.read()}")
            known = json.loads(names)
            yield RunningRuntime(
                Instance.at(data_dir), known["endpoint"], known["pause"], known["busybox"], process.pid
            )
        finally:
            process.terminate()
            process.wait(timeout=60)
