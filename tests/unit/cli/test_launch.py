"""The start of the process: what an operator finds in its log."""

import re
import subprocess
import sys

from pykubelet.config.flags.flag_table import FLAGS
from pykubelet.config.no_effect import FLAG_ATTRIBUTES

LAUNCH = """
import sys
from pykubelet.cli import process
from pykubelet.config.load import load

process.is_root = lambda: False  # it ends after the first lines
sys.exit(process.launch("kubelet", load(sys.argv[1:]), None))
"""

LAUNCH_WITHOUT_THREADS = """
import asyncio, sys, threading
from pykubelet.cli import process
from pykubelet.config.load import load

def fail(_):
    raise RuntimeError("can't start new thread")

async def agent():
    start, threading.Thread.start = threading.Thread.start, fail
    print(await asyncio.gather(*(asyncio.to_thread(str, number) for number in range(3))))
    threading.Thread.start = start

process.is_root = lambda: True
sys.exit(process.launch("kubelet", load([]), agent))
"""


def launched(*flags: str) -> str:
    """Return what a kubelet with these flags logs before it does anything."""
    command = [sys.executable, "-c", LAUNCH, *flags]
    return subprocess.run(command, capture_output=True, text=True, timeout=50, check=False).stderr


def test_launch_logs_every_flag_and_settings_without_effect() -> None:
    # In the text format a message is quoted.
    log = launched("-v=1", "--max-pods=7", "--pod-infra-container-image=pause").replace('\\"', '"')
    found = dict(re.findall(r'FLAG: --([\w-]+)="(.*)""', log))
    assert sorted(found) == sorted(flag.name for flag in FLAGS)
    assert (found["max-pods"], found["port"]) == ("7", "10250")
    reason = FLAG_ATTRIBUTES["pod_infra_container_image"]
    assert f"--pod-infra-container-image is set but has no effect: {reason}" in log


def test_launch_default_verbosity_logs_no_flags() -> None:
    assert "FLAG:" not in launched()


def test_launch_without_further_threads_runs_blocking_work() -> None:
    command = [sys.executable, "-c", LAUNCH_WITHOUT_THREADS]
    found = subprocess.run(command, capture_output=True, text=True, timeout=50, check=False)
    assert (found.returncode, found.stdout) == (0, "['0', '1', '2']\n"), found.stderr
