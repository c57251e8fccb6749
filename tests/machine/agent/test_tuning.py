"""What an agent sets of the machine itself, and takes for granted where it may not."""

import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import pytest

from pykubelet.cm.cgroups.node_cgroups import cgroup_of
from pykubelet.linux.cgroupfs import detect_cgroups
from pykubelet.linux.iptables import CANARY, FIREWALL, HINT, PROGRAMS
from pykubelet.linux.kernel import KERNEL_DEFAULTS
from tests.support.manifests import pod
from tests.support.node import kubelet_node, running
from tests.support.runtime import RunningRuntime

pytestmark = pytest.mark.machine

KEYS = Path("/proc/sys/kernel/keys/root_maxkeys")
"""A setting that harms nobody when it is a little less."""


@contextmanager
def fewer_keys() -> Iterator[None]:
    before = KEYS.read_text()
    KEYS.write_text(str(KERNEL_DEFAULTS["kernel/keys/root_maxkeys"] - 1))
    try:
        yield
    finally:
        KEYS.write_text(before)


def test_kubelet_kernel_defaults_differ_are_set(runtime: RunningRuntime) -> None:
    with fewer_keys(), running(kubelet_node(runtime)):
        assert int(KEYS.read_text()) == KERNEL_DEFAULTS["kernel/keys/root_maxkeys"]


def test_kubelet_protect_kernel_defaults_mismatch_refuses_to_start(runtime: RunningRuntime) -> None:
    node = kubelet_node(runtime, protectKernelDefaults=True)
    code: int | None = None
    try:
        for _ in range(20):
            before = len(node.log_text())
            with fewer_keys():
                node.start(wait=False)
                assert node.process is not None
                deadline = time.monotonic() + 60
                while node.process.poll() is None and "Started kubelet" not in node.log_text()[before:]:
                    assert time.monotonic() < deadline, node.log_text()
                    time.sleep(0.05)
                if node.process.poll() is not None:
                    code, node.process = node.process.returncode, None
                    break
                # An agent of somebody else may have set it meanwhile; then this one had nothing to refuse.
                assert int(KEYS.read_text()) == KERNEL_DEFAULTS["kernel/keys/root_maxkeys"]
            node.kill()
    finally:
        node.kill()
        node.truth.close()
    assert code == 1, node.log_text()
    assert "kernel.keys.root_maxkeys=1000000" in node.log_text().splitlines()[-1]


@pytest.mark.skipif(detect_cgroups().unified, reason="on v2 a cgroup with processes has none below it")
def test_kubelet_cgroups_option_moves_kubelet_to_cgroup(runtime: RunningRuntime) -> None:
    path = f"{runtime.instance.cgroup_root}/agent"
    with running(kubelet_node(runtime, kubeletCgroups=path)) as node:
        assert node.process is not None
        pid = node.process.pid
        node.wait("the agent to be there", lambda: cgroup_of(detect_cgroups(), pid) == path)
        node.start_pod(pod("beside"))
        assert cgroup_of(detect_cgroups(), pid) == path
        node.clear()


@contextmanager
def chains_taken_away() -> Iterator[None]:
    try:
        yield
    finally:
        for program in PROGRAMS:
            for chain in ("INPUT", "OUTPUT"):
                _filter(program, "filter", "-D", chain, "-j", FIREWALL)
            places = [(table, CANARY) for table in ("mangle", "nat", "filter")]
            for table, chain in (*places, ("mangle", HINT), ("filter", FIREWALL)):
                _filter(program, table, "-F", chain)
                _filter(program, table, "-X", chain)


def _filter(program: str, table: str, *words: str) -> None:
    subprocess.run([program, "-w", "-t", table, *words], capture_output=True, check=False)


def _save(program: str) -> str:
    return subprocess.run([f"{program}-save"], capture_output=True, text=True, check=True).stdout


def _has_hint(program: str) -> bool:
    return f":{HINT} " in _save(program)


def test_kubelet_make_iptables_util_chains_creates_chains(runtime: RunningRuntime) -> None:
    if any("KUBE-" in _save(program) for program in PROGRAMS):
        pytest.skip("another agent keeps chains on this machine")
    with chains_taken_away(), running(kubelet_node(runtime, makeIPTablesUtilChains=True)) as node:
        for program in PROGRAMS:
            node.wait(f"chains of {program}", partial(_has_hint, program))
        # One table follows the other.
        node.wait(
            "the rest of them",
            lambda: node.log_text().count("Initialized iptables rules") >= len(PROGRAMS),
        )
        assert f"-A INPUT -j {FIREWALL}" in _save("iptables").splitlines()
    assert not any("KUBE-" in _save(program) for program in PROGRAMS)
    with running(kubelet_node(runtime)):
        assert not any("KUBE-" in _save(program) for program in PROGRAMS)
