"""Entry point of `pykubelet`: the Typer application, and wrong usage as one line.

The modules of the commands import what a command needs when it runs: `pykubelet ps` starts without the
kubelet, gRPC and rich.
"""

from __future__ import annotations

import io
import signal
import sys

import typer

from pykubelet.cli.errors import print_error
from pykubelet.cli.images.commands import app as images_app
from pykubelet.cli.manifests.commands import app as manifests_app
from pykubelet.cli.node.commands import app as node_app
from pykubelet.cli.pods.commands import app as pods_app

INTERRUPTED = 128 + signal.SIGINT
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
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # names of files may contain any bytes
    try:
        code = app(standalone_mode=False)
    except typer.Abort:
        code = INTERRUPTED
    except typer.TyperException as err:
        code = _wrong_usage(err)
    sys.exit(code)


def _wrong_usage(err: typer.TyperException) -> int:
    """Print wrong usage as one line, or the help if there are no arguments; return the exit code."""
    # Typer exports the base of these errors; their classes belong to its private copy of click.
    kind = type(err).__name__
    if kind == "NoArgsIsHelpError":
        print(err.format_message(), file=sys.stderr)
        return err.exit_code
    context = getattr(err, "ctx", None)
    program = context.command_path if context is not None else "pykubelet"
    parameters = context.command.params if context is not None else []
    remedy = f"see `{program} --help`"
    if kind == "NoSuchOption" and any(one.metavar == "COMMAND" for one in parameters):
        remedy = f"if it belongs to the command, write -- before the command; {remedy}"
    print_error(program, f"{' '.join(err.format_message().split()).rstrip('.')}; {remedy}")
    return err.exit_code
