"""`pykubelet`: the friendly command. Each sub-command is a few lines over the rooms that do the work.

Imports happen inside the commands: `up` becomes the agent, whose memory counts, and `--help`
should be instant.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

DEFAULT_DATA_DIR = Path("/var/lib/pykubelet")
FLAGS_FOLLOW = {"allow_extra_args": True, "ignore_unknown_options": True}

app = typer.Typer(
    name="pykubelet",
    help="A Kubernetes node on this machine: one command up, one command down.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
config_app = typer.Typer(help="Look at, check and convert a kubelet's configuration.", no_args_is_help=True)
app.add_typer(config_app, name="config")

DataDir = Annotated[
    Path, typer.Option("--data-dir", help="Where everything of this node lives.", envvar="PYKUBELET_DATA_DIR")
]
Endpoint = Annotated[
    str | None,
    typer.Option(
        "--container-runtime-endpoint", help="Use this runtime (unix:///…) instead of a private one."
    ),
]


def main() -> None:
    """Entry point of the `pykubelet` program."""
    app()


@app.command(context_settings=FLAGS_FOLLOW)
def up(
    context: typer.Context,
    data_dir: DataDir = DEFAULT_DATA_DIR,
    endpoint: Endpoint = None,
    verbosity: Annotated[int, typer.Option("-v", help="How much to say (0 to 10).")] = 0,
) -> None:
    """Start the node in the foreground; Ctrl-C stops the agent and leaves containers running.

    Any flag of the `kubelet` program may follow and wins over what `up` chooses itself.
    """
    from pykubelet.cli.up import run_up

    sys.exit(run_up(data_dir, endpoint, verbosity, context.args))


@app.command()
def down(data_dir: DataDir = DEFAULT_DATA_DIR) -> None:
    """Remove everything that `up` ever made: containers, mounts, network, cgroups, files."""
    from pykubelet.cli.down import run_down

    sys.exit(run_down(data_dir))


@app.command()
def run(
    file: Annotated[Path, typer.Argument(help="A Pod manifest, YAML or JSON.")],
    data_dir: DataDir = DEFAULT_DATA_DIR,
) -> None:
    """Give the node a pod: checks the manifest and puts it into the manifests folder."""
    from pykubelet.cli.run import run_manifest

    sys.exit(run_manifest(file, data_dir))


@app.command()
def doctor(
    data_dir: DataDir = DEFAULT_DATA_DIR,
    endpoint: Endpoint = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the findings as JSON.")] = False,
) -> None:
    """Check this machine and say what to do about each finding."""
    from pykubelet.cli.doctor import run_doctor

    sys.exit(run_doctor(data_dir, endpoint, as_json))


@app.command()
def version() -> None:
    """Print the version."""
    from pykubelet.config.help import version_line

    print(version_line())


@config_app.command("print", context_settings=FLAGS_FOLLOW)
def config_print(context: typer.Context) -> None:
    """Print the effective configuration of a `kubelet` command line, every field, as YAML."""
    from pykubelet.cli.config import print_effective

    sys.exit(print_effective(context.args))


@config_app.command("validate")
def config_validate(files: Annotated[list[Path], typer.Argument(help="Configuration files.")]) -> None:
    """Check configuration files and report every problem with its field."""
    from pykubelet.cli.config import validate_files

    sys.exit(validate_files(files))


@config_app.command("convert-flags", context_settings=FLAGS_FOLLOW)
def config_convert(context: typer.Context) -> None:
    """Turn a `kubelet` command line into a configuration file that means the same."""
    from pykubelet.cli.config import convert

    sys.exit(convert(context.args))
