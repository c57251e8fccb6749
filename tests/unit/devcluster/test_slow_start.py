"""The start of a control plane on a slow host, where components exit before the API server is ready."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from pykubelet.devcluster.binaries import Binaries
from pykubelet.devcluster.cluster import DevCluster, new_settings
from pykubelet.devcluster.layout import DevClusterError, Layout

RUNS = "runs"
EXITING = f'#!/bin/sh\necho "E1116 no API server"\necho x >> {{directory}}/{RUNS}\nexit 1\n'
LASTING = "#!/bin/sh\nexec sleep 1000\n"


class SlowCluster(DevCluster):
    """A control plane whose API server becomes ready only at the `ready_at`-th check."""

    ready_at = 6
    checks = 0
    runs_needed = 3

    @property
    def runs(self) -> int:
        """Number of starts of the controller manager."""
        path = self.layout.directory / RUNS
        return len(path.read_text().split()) if path.exists() else 0

    def is_ready(self) -> bool:
        self.checks += 1
        if self.checks == self.ready_at:
            self.runs_when_ready = self.runs
        return self.checks >= self.ready_at

    def _is_responding(self) -> bool:
        return True

    def _make_objects(self) -> bool:
        return self.runs >= self.runs_needed

    def _is_usable(self) -> bool:
        return True


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[SlowCluster]:
    """A control plane of shell scripts: its controller manager exits at each start."""
    directory = tmp_path / "cluster"
    for name in ("etcd", "kube-apiserver", "kube-controller-manager", "kube-scheduler", "kubectl"):
        script = EXITING if name == "kube-controller-manager" else LASTING
        (tmp_path / name).write_text(script.format(directory=directory))
        (tmp_path / name).chmod(0o755)
    programs = Binaries(
        etcd=tmp_path / "etcd",
        apiserver=tmp_path / "kube-apiserver",
        controller_manager=tmp_path / "kube-controller-manager",
        scheduler=tmp_path / "kube-scheduler",
        kubectl=tmp_path / "kubectl",
        kubelet=None,
    )
    made = SlowCluster(Layout.at(directory), new_settings(address="127.0.0.1"), programs, owned=True)
    made.prepare()
    try:
        yield made
    finally:
        for child in made._started.values():
            child.kill()
            child.wait()


def test_start_api_server_not_ready_restarts_no_dependent_component(cluster: SlowCluster) -> None:
    cluster.start(timeout=20)
    assert cluster.runs_when_ready <= 1
    assert cluster.runs >= cluster.runs_needed


def test_start_dependent_component_keeps_exiting_error_quotes_its_log(cluster: SlowCluster) -> None:
    cluster.runs_needed = 100
    with pytest.raises(DevClusterError, match=r"kube-controller-manager ended while .*: E1116 no API server"):
        cluster.start(timeout=20)
