"""Implementation of `pykubelet dev cluster up|down|status`, imported when one of these commands runs.

`up` also writes a kubeconfig and a KubeletConfiguration for a node of the cluster and prints the commands
to start one. The control plane itself belongs to the devcluster package.
"""

from __future__ import annotations

import shutil
import time
from pathlib import Path
from typing import Any

import yaml

from pykubelet.api.duration import Duration
from pykubelet.cli.client import run_command
from pykubelet.cli.printers import format_columns
from pykubelet.config.types import API_VERSION, KIND
from pykubelet.devcluster import lifecycle
from pykubelet.devcluster.binaries import control_plane_version
from pykubelet.devcluster.cluster import DevCluster
from pykubelet.devcluster.identities import node_kubeconfig
from pykubelet.devcluster.layout import CLUSTER_DOMAIN, Component, DevClusterError, Layout
from pykubelet.devcluster.lifecycle import UpOptions
from pykubelet.linux import HostError
from pykubelet.linux.network import node_name

PROGRAM = "pykubelet dev cluster"
_MINIMUM_SIGNING = 60.0


def run_cluster_up(data_dir: Path, options: UpOptions, node: str) -> int:
    """Start the control plane, write a node's configuration, print the next steps; return the exit code."""

    def work() -> int:
        _check(options)
        name = node_name(node)
        started_at = time.monotonic()
        cluster, started = lifecycle.bring_up(data_dir, options, _report)
        layout = cluster.layout
        node_kubeconfig(layout, cluster.settings, name, layout.kubeconfig("node"))
        layout.kubelet_config.write_text(
            "# A node of the cluster in this folder; written at each `pykubelet dev cluster up`.\n"
            + yaml.safe_dump(node_config(layout), sort_keys=False)
        )
        seconds = f"ready after {time.monotonic() - started_at:.1f} s" if started else "already running"
        print(f"Kubernetes {control_plane_version(cluster.programs)} at {cluster.server}: {seconds}\n")
        print(next_steps(cluster, name, data_dir))
        return 0

    return run_command(f"{PROGRAM} up", work, DevClusterError, HostError)


def run_cluster_down(data_dir: Path) -> int:
    """Stop the control plane and remove its files; return the exit code."""

    def work() -> int:
        found = lifecycle.tear_down(data_dir, _report)
        print("Nothing is left." if found else f"There is no cluster in {data_dir}.")
        return 0

    return run_command(f"{PROGRAM} down", work, DevClusterError)


def run_cluster_status(data_dir: Path) -> int:
    """Print the state of the components and the API server; return 0 if all run and it is ready, else 1."""

    def work() -> int:
        state, layout = lifecycle.observe(data_dir), Layout.at(data_dir)
        if state.settings is None:
            print(f"There is no cluster in {data_dir}: make one with `{PROGRAM} up`.")
            return 1
        rows = [("COMPONENT", "STATUS", "PID", "LOG")]
        for component in Component:
            process = state.running.get(component)
            status = "running" if process else "not running"
            rows.append((component, status, str(process.pid) if process else "-", str(layout.log(component))))
        print("\n".join(format_columns(rows)))
        readiness = "ready" if state.ready else "not ready"
        print(f"\nAPI server at https://{state.settings.address}:{state.settings.port}: {readiness}")
        print(f"Admin's kubeconfig: {layout.kubeconfig('admin')}")
        if state.missing:
            print(f"`{PROGRAM} up` starts what does not run.")
        return 0 if state.ready and not state.missing else 1

    return run_command(f"{PROGRAM} status", work, DevClusterError)


def node_config(layout: Layout) -> dict[str, Any]:
    """Return a KubeletConfiguration for a node of this cluster that uses the host's containerd.

    It sets no clusterDNS, because the cluster has no DNS server: pods use the host's resolver.
    """
    return {
        "apiVersion": API_VERSION,
        "kind": KIND,
        "authentication": {
            "anonymous": {"enabled": False},
            "webhook": {"enabled": True},
            "x509": {"clientCAFile": str(layout.authority)},
        },
        "authorization": {"mode": "Webhook"},
        "clusterDomain": CLUSTER_DOMAIN,
        "rotateCertificates": True,
        "failSwapOn": False,
    }


def next_steps(cluster: DevCluster, node: str, data_dir: Path) -> str:
    """Return the text with the commands that a user can run next."""
    layout = cluster.layout
    admin, ready, bootstrap = (layout.kubeconfig(name) for name in ("admin", "node", "bootstrap"))
    kubectl = "kubectl" if shutil.which("kubectl") else str(cluster.programs.kubectl)
    down = f"{PROGRAM} down"
    if data_dir != lifecycle.DEFAULT_DATA_DIR:
        down += f" --data-dir {layout.directory}"
    hostname_flag = f" --hostname-override={node}"
    return f"""\
Look at it:
  export KUBECONFIG={admin}
  {kubectl} get nodes

Make this machine its node {node}, with a container runtime of its own:
  pykubelet up --kubeconfig={ready}{hostname_flag}

... or on the machine's containerd:
  kubelet --kubeconfig={ready}{hostname_flag} \\
    --config={layout.kubelet_config}

... or from the bootstrap token, as a new machine joins:
  kubelet --bootstrap-kubeconfig={bootstrap} \\
    --kubeconfig=/var/lib/kubelet/kubeconfig{hostname_flag} --config={layout.kubelet_config}

Remove it all:
  {down}"""


def _check(options: UpOptions) -> None:
    if options.signing_duration is None:
        return
    try:
        seconds = Duration.parse(options.signing_duration).seconds
    except ValueError as err:
        raise DevClusterError(f"bad --signing-duration: {err}") from err
    if seconds < _MINIMUM_SIGNING:
        raise DevClusterError("bad --signing-duration: certificates must live for a minute at least")


def _report(text: str) -> None:
    print(text, flush=True)
