"""`pykubelet up` and wrong input: one line, and nothing is made."""

import dataclasses
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from pykubelet.cli.node.up import runtime_line
from pykubelet.standalone.requirements import HostRequirements
from tests.support.ports import free_port

PYKUBELET = str(Path(sys.executable).parent / "pykubelet")


def up(data_dir: Path, *argv: str) -> subprocess.CompletedProcess[str]:
    command = [PYKUBELET, "up", "--data-dir", str(data_dir), *argv]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        (["--no-such-flag"], "no-such-flag"),
        (["--max-pods=many"], "max-pods"),
        (["--config=/etc/kubelet.yaml"], "/etc/kubelet.yaml"),
        (["--feature-gates=Nonsense=true"], "Nonsense"),
    ],
)
def test_pykubelet_up_invalid_flag_exits_1_and_creates_nothing(
    tmp_path: Path, argv: list[str], says: str
) -> None:
    done = up(tmp_path / "d", *argv)
    assert done.returncode == 1
    assert says in done.stderr
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "d").exists()


def test_pykubelet_up_config_flag_rejected(tmp_path: Path) -> None:
    config = tmp_path / "kubelet.yaml"
    config.write_text("apiVersion: kubelet.config.k8s.io/v1beta1\nkind: KubeletConfiguration\n")
    done = up(tmp_path / "d", f"--config={config}")
    assert done.returncode == 1
    assert done.stderr.startswith("pykubelet up: `up` writes its own configuration")
    assert not (tmp_path / "d").exists()


@pytest.mark.parametrize("flag", ["port", "healthz-port", "read-only-port"])
def test_pykubelet_up_port_in_use_exits_1_and_creates_nothing(tmp_path: Path, flag: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as holder:
        port = holder.getsockname()[1]
        free = {"port": free_port(), "healthz-port": 0, "read-only-port": 0}
        done = up(tmp_path / "d", *(f"--{name}={value}" for name, value in {**free, flag: port}.items()))
    assert done.returncode == 1
    assert f"port {port}" in done.stderr
    assert f"--{flag}" in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1
    assert not (tmp_path / "d").exists()


def test_pykubelet_up_foreign_data_dir_rejected_and_unchanged(tmp_path: Path) -> None:
    (tmp_path / "precious").write_text("do not touch")
    done = up(tmp_path, f"--port={free_port()}", "--healthz-port=0", "--read-only-port=0")
    assert done.returncode == 1
    assert "was not made by pykubelet" in done.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["precious"]


@pytest.mark.parametrize("path", ["/", "/usr", "/etc"])
def test_pykubelet_up_system_directory_as_data_dir_rejected(path: str) -> None:
    done = up(Path(path), f"--port={free_port()}", "--healthz-port=0", "--read-only-port=0")
    assert done.returncode == 1
    assert len(done.stderr.strip().splitlines()) == 1


def test_runtime_line_old_containerd_names_what_newer_ones_add() -> None:
    host = HostRequirements(
        {"containerd": Path("/usr/bin/containerd")}, Path("/cni"), False, False, (1, 7, 2)
    )
    line = runtime_line(host)
    assert line.startswith("Runtime: containerd 1.7.2 (/usr/bin/containerd), which has no user namespaces, ")
    assert "image volumes" in line
    assert "CDI" not in line
    newest = runtime_line(dataclasses.replace(host, containerd_version=(2, 4, 2)))
    assert newest == "Runtime: containerd 2.4.2 (/usr/bin/containerd)"
