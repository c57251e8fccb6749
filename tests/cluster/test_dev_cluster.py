"""`pykubelet dev cluster`: up, found again, repaired, down; and one line for whatever is wrong."""

import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from pykubelet.config.load import load
from pykubelet.devcluster import cluster
from pykubelet.devcluster.binaries import Binaries
from pykubelet.devcluster.cluster import free_ports, running
from pykubelet.devcluster.layout import Component, Layout

PYKUBELET = str(Path(sys.executable).parent / "pykubelet")


@pytest.fixture
def folder() -> Iterator[Path]:
    """Where a cluster may be made; whatever is there afterwards is removed as a person would do it."""
    with tempfile.TemporaryDirectory(prefix="pykc-", dir="/tmp") as parent:
        path = Path(parent) / "dev"
        yield path
        if path.exists() or running(Layout.at(path)):
            done = dev("down", path)
            assert done.returncode == 0, done.stderr
        assert running(Layout.at(path)) == {}
        assert not path.exists()


def dev(verb: str, folder: Path, *argv: str) -> subprocess.CompletedProcess[str]:
    command = [PYKUBELET, "dev", "cluster", verb, "--data-dir", str(folder), *argv]
    return subprocess.run(command, capture_output=True, text=True, timeout=180, check=False)


def one_line(done: subprocess.CompletedProcess[str], *parts: str) -> None:
    """The command has failed with one line that has all these parts."""
    assert done.returncode == 1, done.stdout
    (line,) = done.stderr.splitlines()
    assert all(part in line for part in parts), line


def up(folder: Path, port: int) -> tuple[str, dict[Component, int]]:
    """Start a cluster; gives what was said and the pids."""
    done = dev("up", folder, f"--port={port}", "--node=here")
    assert done.returncode == 0, done.stderr
    return done.stdout, {name: process.pid for name, process in running(Layout.at(folder)).items()}


def kill(folder: Path, *pids: int) -> None:
    """End processes of a cluster as a power cut would, and wait until they are gone."""
    for pid in pids:
        os.kill(pid, signal.SIGKILL)
    deadline = time.monotonic() + 60
    while any(process.pid in pids for process in running(Layout.at(folder)).values()):
        assert time.monotonic() < deadline
        time.sleep(0.02)


@pytest.fixture
def port() -> int:
    """One that is free now, not when the tests were collected."""
    return free_ports(1)[0]


def test_dev_cluster_up_status_repair_and_down(programs: Binaries, folder: Path, port: int) -> None:
    said, pids = up(folder, port)
    assert set(pids) == set(Component)
    assert f"export KUBECONFIG={folder}/admin.kubeconfig" in said
    assert f"--kubeconfig={folder}/node.kubeconfig" in said
    assert f"--bootstrap-kubeconfig={folder}/bootstrap.kubeconfig" in said
    # Nobody who ends with the terminal: sessions of their own.
    assert all(os.getsid(pid) == pid for pid in pids.values())
    assert load([f"--config={folder}/kubelet.yaml"]).config.authorization.mode == "Webhook"
    for name, user in (("node", "system:node:here"), ("bootstrap", "system:bootstrap:")):
        path = folder / f"{name}.kubeconfig"
        assert path.stat().st_mode & 0o077 == 0
        told = subprocess.run(
            [programs.kubectl, f"--kubeconfig={path}", "auth", "whoami", "-o", "yaml"],
            capture_output=True,
            text=True,
            check=True,
            timeout=60,
        )
        assert yaml.safe_load(told.stdout)["status"]["userInfo"]["username"].startswith(user)

    again, same = up(folder, port)
    assert "already running" in again
    assert same == pids
    status = dev("status", folder)
    assert status.returncode == 0
    assert status.stdout.count("running") == 4

    one_line(dev("up", folder, "--audit"), "already runs", "--audit", "dev cluster down")

    kill(folder, pids[Component.APISERVER], pids[Component.ETCD])
    broken = dev("status", folder)
    assert broken.returncode == 1
    assert "not running" in broken.stdout
    repaired, after = up(folder, port)
    assert "Starting etcd, kube-apiserver\n" in repaired
    assert set(after) == set(Component)

    # All gone, as after a reboot: it goes on where it was.
    kill(folder, *after.values())
    up(folder, port)
    done = dev("down", folder)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "Nothing is left."
    assert not folder.exists()
    assert "There is no cluster" in dev("down", folder).stdout
    assert dev("status", folder).returncode == 1


@pytest.mark.parametrize("sign", [signal.SIGKILL, signal.SIGINT])
def test_dev_cluster_up_interrupted_cleans_up_or_resumes(
    programs: Binaries, folder: Path, sign: signal.Signals, port: int
) -> None:
    command = [PYKUBELET, "dev", "cluster", "up", "--data-dir", str(folder), f"--port={port}"]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        deadline = time.monotonic() + 60
        while Component.APISERVER not in running(Layout.at(folder)):
            assert process.poll() is None
            assert time.monotonic() < deadline
            time.sleep(0.02)
        process.send_signal(sign)
        assert process.wait(60) != 0
    if sign == signal.SIGINT:
        assert running(Layout.at(folder)) == {}
    else:
        # And the others, if the API server was quicker than the signal.
        assert set(running(Layout.at(folder))) >= {Component.ETCD, Component.APISERVER}
        up(folder, port)


def test_new_settings_explicit_port_reserved_for_api_server(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cluster, "free_ports", lambda count: list(range(20001, 20001 + count)))
    for port in range(20000, 20005):
        made = cluster.new_settings(port, address="127.0.0.1")
        assert made.port == port
        assert len({port, made.etcd_port, made.etcd_peer_port}) == 3


def test_dev_cluster_up_port_in_use_error_names_holder(programs: Binaries, folder: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as holder:
        port = holder.getsockname()[1]
        done = dev("up", folder, f"--port={port}")
    one_line(done, f"port {port} of the API server is taken by pid {os.getpid()}", "--port")
    assert not folder.exists()


def test_dev_cluster_up_failing_binary_error_quotes_output(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, port: int
) -> None:
    for name in ("etcd", "kube-apiserver", "kube-controller-manager", "kube-scheduler", "kubectl"):
        (tmp_path / name).write_text("#!/bin/sh\necho 'E1116 cannot do that'\nexit 1\n")
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("KUBEBUILDER_ASSETS", str(tmp_path))
    one_line(dev("up", folder, f"--port={port}"), "ended while waiting for", "cannot do that")


def test_dev_cluster_up_binaries_missing_exits_with_error(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KUBEBUILDER_ASSETS", str(tmp_path))
    one_line(dev("up", folder), "has no etcd and no kube-apiserver")
    assert not folder.exists()


@pytest.mark.parametrize("verb", ["up", "down", "status"])
def test_dev_cluster_foreign_data_dir_rejected_and_unchanged(tmp_path: Path, verb: str) -> None:
    (tmp_path / "precious").write_text("do not touch")
    one_line(dev(verb, tmp_path), "was not made by", "--data-dir")
    assert [path.name for path in tmp_path.iterdir()] == ["precious"]


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        (["--signing-duration=soon"], "--signing-duration"),
        (["--signing-duration=1s"], "a minute at least"),
        (["--node=Not A Name"], "cannot be a node's name"),
    ],
)
def test_dev_cluster_up_invalid_option_rejected(folder: Path, argv: list[str], says: str) -> None:
    one_line(dev("up", folder, *argv), says)
    assert not folder.exists()


def test_dev_cluster_unreadable_settings_file_error_has_remedy(programs: Binaries, folder: Path) -> None:
    folder.mkdir()
    (folder / ".pykubelet-dev").touch()
    (folder / "cluster.json").write_text("{")
    one_line(dev("up", folder), "cannot be read", "dev cluster down")
    one_line(dev("status", folder), "cannot be read")


def test_dev_cluster_up_parent_directory_missing_error_has_remedy(
    programs: Binaries, tmp_path: Path, port: int
) -> None:
    done = dev("up", tmp_path / "a" / "b", f"--port={port}")
    one_line(done, f"mkdir -p {tmp_path / 'a'}")
