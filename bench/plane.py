"""A control plane for a measurement, and an agent that is a node of it."""

from __future__ import annotations

import contextlib
import http.client
import json
import ssl
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import yaml

from bench.node import BIN
from pykubelet.cm.cgroups.driver import CgroupFiles
from pykubelet.cm.cgroups.values import CgroupValues, parse_path
from pykubelet.devcluster.binaries import Binaries
from pykubelet.devcluster.cluster import DevCluster, free_ports, new_settings
from pykubelet.devcluster.identities import node_kubeconfig
from pykubelet.devcluster.layout import Layout
from pykubelet.linux.cgroupfs import detect_cgroups
from pykubelet.standalone.instance import Instance

NODE = "bench"
USER = f"system:node:{NODE}"
_WRITES = frozenset({"create", "update", "patch", "delete"})
_WAIT_SECONDS = 60.0


@contextlib.contextmanager
def control_plane(programs: Binaries) -> Iterator[DevCluster]:
    """Run a control plane that writes down what is asked of it."""
    with tempfile.TemporaryDirectory(prefix="pykc-", dir="/tmp") as folder:
        settings = msgspec.structs.replace(new_settings(), audit=True, durable=False)
        cluster = DevCluster(Layout.at(Path(folder)), settings, programs, owned=True)
        cluster.prepare()
        try:
            cluster.start()
            yield cluster
        finally:
            cluster.stop(grace=0)


class Agent:
    """A kubelet, ours or the reference, as the node `bench`; started and stopped at will."""

    def __init__(self, cluster: DevCluster, instance: Instance, program: Path | None = None) -> None:
        self._cluster = cluster
        self._log = instance.data_dir.parent / "agent.log"
        self._process: subprocess.Popen[bytes] | None = None
        self.port, self.health_port = free_ports(2)
        self._command = _command(cluster, instance, program or BIN / "kubelet", self.port, self.health_port)
        # The reference wants its cgroup root to exist; ours makes it.
        CgroupFiles(detect_cgroups()).make(parse_path(instance.cgroup_root), CgroupValues())

    def connect(self) -> http.client.HTTPSConnection:
        """Connect to its server as the cluster's administrator, without verifying its certificate."""
        layout, context = self._cluster.layout, ssl.create_default_context()
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
        context.load_cert_chain(layout.certificate("admin"), layout.key("admin"))
        return http.client.HTTPSConnection("127.0.0.1", self.port, context=context, timeout=60)

    @property
    def pid(self) -> int:
        """The process that is measured."""
        assert self._process is not None
        return self._process.pid

    def start(self) -> float:
        """Start it; gives the seconds until the API server has the node as Ready."""
        self._unknown()
        began = time.monotonic()
        with self._log.open("ab") as output:
            self._process = subprocess.Popen(
                ["setpriv", "--pdeathsig", "TERM", "--", *self._command], stdout=output, stderr=output
            )
        self.wait("the node to be Ready", lambda: self._status() == "True")
        return time.monotonic() - began

    def stop(self) -> None:
        """Ask it to end."""
        if self._process is not None:
            self._process.terminate()
            self._process.wait(30)
            self._process = None

    def wait(self, what: str, look: Callable[[], bool], seconds: float = _WAIT_SECONDS) -> None:
        """Wait for something while the agent lives."""
        deadline = time.monotonic() + seconds
        while not look():
            if self._process is None or self._process.poll() is not None or time.monotonic() > deadline:
                tail = self._log.read_text(errors="replace")[-3000:]
                raise RuntimeError(f"waited in vain for {what}; the agent's log ends with:\n{tail}")
            time.sleep(0.02)

    def _conditions(self) -> list[dict[str, Any]]:
        nodes = self._cluster.api.request("GET", "/api/v1/nodes")["items"]
        return [one for node in nodes for one in node["status"].get("conditions", ())]

    def _status(self) -> str:
        return next((one["status"] for one in self._conditions() if one["type"] == "Ready"), "")

    def _unknown(self) -> None:
        """Say of an earlier life's node what the control plane says of one that has gone silent."""
        if conditions := self._conditions():
            for one in conditions:
                one["status"] = "Unknown"
            self._cluster.api.request(
                "PATCH",
                f"/api/v1/nodes/{NODE}/status",
                {"status": {"conditions": conditions}},
                content_type="application/merge-patch+json",
            )


def pod_writes(cluster: DevCluster, since: int) -> list[dict[str, Any]]:
    """What the node has written since then about pods and for them: heartbeats and events aside."""
    with cluster.layout.audit_log.open("rb") as file:
        file.seek(since)
        events = [json.loads(line) for line in file.read().split(b"\n")[:-1]]
    return [
        event
        for event in events
        if event["stage"] == "ResponseComplete"
        and event["verb"] in _WRITES
        and event["user"]["username"] == USER
        and event["objectRef"]["resource"] in ("pods", "serviceaccounts", "configmaps", "secrets")
    ]


def audit_mark(cluster: DevCluster) -> int:
    """Where the audit log ends now."""
    return cluster.layout.audit_log.stat().st_size


def _command(
    cluster: DevCluster, instance: Instance, program: Path, port: int, health_port: int
) -> list[str]:
    layout = cluster.layout
    kubeconfig = layout.directory / "bench.kubeconfig"
    node_kubeconfig(layout, cluster.settings, NODE, kubeconfig)
    config = {
        "apiVersion": "kubelet.config.k8s.io/v1beta1",
        "kind": "KubeletConfiguration",
        # A measurement leaves the machine's packet filter alone.
        "makeIPTablesUtilChains": False,
        "containerRuntimeEndpoint": instance.endpoint,
        "cgroupRoot": instance.cgroup_root,
        "podLogsDir": str(instance.pod_logs),
        "volumePluginDir": str(instance.kubelet_root / "volume-plugins"),
        "port": port,
        "healthzPort": health_port,
        "authentication": {"x509": {"clientCAFile": str(layout.authority)}},
        "maxPods": 300,
        "failSwapOn": False,
        "failCgroupV1": False,
    }
    path = layout.directory / "bench.yaml"
    path.write_text(yaml.safe_dump(config))
    root = instance.kubelet_root
    return [
        str(program),
        f"--config={path}",
        f"--kubeconfig={kubeconfig}",
        f"--root-dir={root}",
        f"--cert-dir={root}/pki",
        f"--hostname-override={NODE}",
        # The default is shared with other kubelets of this host; the upstream kubelet has no such flag.
        *([f"--device-plugin-dir={root}/device-plugins"] if program == BIN / "kubelet" else []),
    ]
