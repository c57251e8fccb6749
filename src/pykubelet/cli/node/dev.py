"""Commands below `pykubelet dev`; their implementation is imported when one of them runs."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

DEFAULT_DATA_DIR = Path("/var/lib/pykubelet-dev")
dev_app = typer.Typer(help="Tools for development.", no_args_is_help=True)
cluster_app = typer.Typer(
    help="A real Kubernetes control plane on this machine, for nodes to join.", no_args_is_help=True
)
dev_app.add_typer(cluster_app, name="cluster")
DataDir = Annotated[
    Path,
    typer.Option(
        "--data-dir", help="Where everything of the control plane lives.", envvar="PYKUBELET_DEV_DATA_DIR"
    ),
]


@cluster_app.command("up")
def cluster_up(
    data_dir: DataDir = DEFAULT_DATA_DIR,
    port: Annotated[
        int | None, typer.Option("--port", min=1, max=65535, help="The API server's port.  [default: 6443]")
    ] = None,
    node: Annotated[
        str,
        typer.Option("--node", help="The node's name in the ready kubeconfig.  [default: this machine's]"),
    ] = "",
    signing_duration: Annotated[
        str | None, typer.Option("--signing-duration", help="How long nodes' certificates live, such as 2m.")
    ] = None,
    audit: Annotated[
        bool | None, typer.Option("--audit/--no-audit", help="Write every request down.")
    ] = None,
    verify_kubelets: Annotated[
        bool | None,
        typer.Option(
            "--verify-kubelets/--no-verify-kubelets",
            help="Ask only kubelets for logs whose serving certificate the cluster signed.",
        ),
    ] = None,
) -> None:
    """Start etcd, kube-apiserver, kube-controller-manager and kube-scheduler in the background.

    The first start builds them from source. A running cluster is left as it is; missing processes of a
    stopped or damaged cluster are started again with its existing data.
    """
    from pykubelet.cli.node.dev_cluster import run_cluster_up
    from pykubelet.devcluster.lifecycle import UpOptions

    options = UpOptions(port, signing_duration, audit, verify_kubelets)
    sys.exit(run_cluster_up(data_dir, options, node))


@cluster_app.command("down")
def cluster_down(data_dir: DataDir = DEFAULT_DATA_DIR) -> None:
    """Stop the control plane and remove all of its data."""
    from pykubelet.cli.node.dev_cluster import run_cluster_down

    sys.exit(run_cluster_down(data_dir))


@cluster_app.command("status")
def cluster_status(data_dir: DataDir = DEFAULT_DATA_DIR) -> None:
    """Show the components; the exit code is 0 only if all of them run and the API server is ready."""
    from pykubelet.cli.node.dev_cluster import run_cluster_status

    sys.exit(run_cluster_status(data_dir))
