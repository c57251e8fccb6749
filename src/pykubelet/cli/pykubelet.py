"""Entry point of `pykubelet`: the Typer application.

X
"""

from __future__ import annotations

import typer

from pykubelet.cli.images.commands import app as images_app
from pykubelet.cli.manifests.commands import app as manifests_app
from pykubelet.cli.node.commands import app as node_app
from pykubelet.cli.pods.commands import app as pods_app

app = typer.Typer(
    name="pykubelet",
    help="A Kubernetes node on this machine: one command up, one command down.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
app.add_typer(node_app)
app.add_typer(manifests_app)
app.add_typer(images_app)
app.add_typer(pods_app)


def main() -> None:
    """Run the `pykubelet` command line."""
    app()
