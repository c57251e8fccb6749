"""Entry point of `pykubelet`: the Typer application.

The other commands are implemented in modules of their own, which are imported inside the command functions:
`up` becomes the kubelet, whose memory use matters, and `--help` must start fast.
"""

from __future__ import annotations

import sys
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from pykubelet.cli.dev import dev_app

if TYPE_CHECKING:
    from pykubelet.api.duration import Duration

DEFAULT_DATA_DIR = Path("/var/lib/pykubelet")
FLAGS_FOLLOW = {"allow_extra_args": True, "ignore_unknown_options": True}
app = typer.Typer(
    name="pykubelet",
    help="A Kubernetes node on this machine: one command up, one command down.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
config_app = typer.Typer(
    help="Look at, check, convert and reload a kubelet's configuration.", no_args_is_help=True
)
app.add_typer(config_app, name="config")
app.add_typer(dev_app, name="dev")
DataDir = Annotated[
    Path, typer.Option("--data-dir", help="Where everything of this node lives.", envvar="PYKUBELET_DATA_DIR")
]
Endpoint = Annotated[
    str | None,
    typer.Option(
        "--container-runtime-endpoint", help="Use this runtime (unix:///…) instead of a private one."
    ),
]
PodName = Annotated[
    str, typer.Argument(help="Its name, NAMESPACE/NAME, or the beginning of its uid.", show_default=False)
]
ContainerName = Annotated[
    str | None, typer.Option("--container", "-c", help="Which of its containers.", show_default=False)
]


class Output(StrEnum):
    """Output format of `ps`."""

    TABLE = "table"
    WIDE = "wide"
    JSON = "json"


class TopOutput(StrEnum):
    """Output format of `top`."""

    TABLE = "table"
    WIDE = "wide"
    JSON = "json"
    YAML = "yaml"
    NAME = "name"


class PressureOutput(StrEnum):
    """Output format of `pressure`."""

    TABLE = "table"
    JSON = "json"


class TopSort(StrEnum):
    """Sort key of `top`."""

    CPU = "cpu"
    MEMORY = "memory"
    CPU_LIMIT = "cpu-limit"
    MEMORY_LIMIT = "memory-limit"
    RESTARTS = "restarts"
    NETWORK = "network"
    EPHEMERAL = "ephemeral"
    NAME = "name"


MIN_INTERVAL_SECONDS, MAX_INTERVAL_SECONDS = 1, 3600
"""Bounds of `top --interval`."""


def main() -> None:
    """Run the `pykubelet` command line."""
    app()


@app.command(context_settings=FLAGS_FOLLOW)
def up(
    context: typer.Context,
    data_dir: DataDir = DEFAULT_DATA_DIR,
    endpoint: Endpoint = None,
    verbosity: Annotated[int, typer.Option("-v", help="How much to say (0 to 10).")] = 0,
) -> None:
    """Start the node in the foreground; Ctrl-C stops the kubelet and leaves containers running.

    Any flag of the `kubelet` command may follow and overrides what `up` configures.
    """
    from pykubelet.cli.up import run_up

    sys.exit(run_up(data_dir, endpoint, verbosity, context.args))


@app.command()
def down(data_dir: DataDir = DEFAULT_DATA_DIR) -> None:
    """Remove everything that `up` created: containers, mounts, network, cgroups, files."""
    from pykubelet.cli.up import run_down

    sys.exit(run_down(data_dir))


@app.command()
def run(
    file: Annotated[Path, typer.Argument(help="A manifest, YAML or JSON: pods, and ConfigMaps and Secrets.")],
    data_dir: DataDir = DEFAULT_DATA_DIR,
    detach: Annotated[
        bool, typer.Option("--detach", "-d", help="Hand it over and do not wait until it is ready.")
    ] = False,
    replace: Annotated[
        bool,
        typer.Option("--replace", help="Take the place of other manifests with this name or these pods."),
    ] = False,
    timeout: Annotated[str, typer.Option("--timeout", help="How long to wait, such as 90s or 5m.")] = "5m",
) -> None:
    """Run a manifest on the node and wait until its pods are ready; on failure print the cause."""
    from pykubelet.cli.run import RunOptions, run_manifest

    seconds = _duration(timeout, "--timeout").seconds
    sys.exit(run_manifest(data_dir, RunOptions(file, detach=detach, replace=replace, timeout=seconds)))


@app.command()
def ps(
    data_dir: DataDir = DEFAULT_DATA_DIR,
    watch: Annotated[bool, typer.Option("--watch", "-w", help="Go on showing what changes.")] = False,
    output: Annotated[
        Output, typer.Option("--output", "-o", help="A table, one with resource usage, or a PodList.")
    ] = Output.TABLE,
) -> None:
    """Show the node's pods."""
    from pykubelet.cli.ps import run_ps

    if watch and output is Output.JSON:
        raise typer.BadParameter("--watch shows a table: leave out one of the two")
    sys.exit(run_ps(data_dir, watch=watch, as_json=output is Output.JSON, wide=output is Output.WIDE))


@app.command()
def top(
    pod: Annotated[
        str | None,
        typer.Argument(help="Show the containers of this pod; named as in the other commands."),
    ] = None,
    data_dir: DataDir = DEFAULT_DATA_DIR,
    node: Annotated[
        bool, typer.Option("--node", help="Show the node and its system containers instead of pods.")
    ] = False,
    sort: Annotated[TopSort, typer.Option("--sort", help="What comes first: the largest.")] = TopSort.CPU,
    watch: Annotated[
        bool, typer.Option("--watch", "-w", help="Update until Ctrl-C; network traffic is per second.")
    ] = False,
    interval: Annotated[str, typer.Option("--interval", help="Time between updates, with -w.")] = "5s",
    output: Annotated[
        TopOutput,
        typer.Option("--output", "-o", help="A table, one with more columns, a Summary, or only names."),
    ] = TopOutput.TABLE,
) -> None:
    """Show CPU, memory, network and storage usage of pods, of a pod's containers, or of the node."""
    from pykubelet.cli.top import TopOptions, run_top

    if pod is not None and node:
        raise typer.BadParameter("--node shows the node, not a pod: leave out one of the two")
    if watch and output not in (TopOutput.TABLE, TopOutput.WIDE):
        raise typer.BadParameter("--watch shows a table: leave out one of the two")
    seconds = _duration(interval, "--interval").seconds
    if not MIN_INTERVAL_SECONDS <= seconds <= MAX_INTERVAL_SECONDS:
        raise typer.BadParameter(f"{interval!r} is not between 1s and 1h", param_hint="--interval")
    options = TopOptions(
        pod=pod, node=node, sort=sort.value, output=output.value, watch=watch, interval=seconds
    )
    sys.exit(run_top(data_dir, options))


@app.command()
def pressure(
    data_dir: DataDir = DEFAULT_DATA_DIR,
    output: Annotated[PressureOutput, typer.Option("--output", "-o", help="A table, or JSON.")] = (
        PressureOutput.TABLE
    ),
) -> None:
    """Show how far the node is from each eviction threshold, and which pod would be evicted first."""
    from pykubelet.cli.pressure import run_pressure

    sys.exit(run_pressure(data_dir, as_json=output is PressureOutput.JSON))


@app.command()
def logs(
    pod: PodName,
    data_dir: DataDir = DEFAULT_DATA_DIR,
    container: ContainerName = None,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Go on with what is written.")] = False,
    previous: Annotated[bool, typer.Option("--previous", "-p", help="The run before this one.")] = False,
    tail: Annotated[
        int | None, typer.Option("--tail", min=0, help="Only this many of the last lines.")
    ] = None,
    timestamps: Annotated[bool, typer.Option("--timestamps", help="When each line was written.")] = False,
    since: Annotated[str | None, typer.Option("--since", help="Only lines this young, such as 5m.")] = None,
) -> None:
    """Print the logs of a container."""
    from pykubelet.cli.logs import LogOptions, run_logs

    age = _duration(since, "--since") if since is not None else None
    sys.exit(run_logs(data_dir, LogOptions(pod, container, follow, previous, tail, timestamps, age)))


@app.command("exec")
def exec_command(
    pod: PodName,
    command: Annotated[list[str], typer.Argument(help="The command, after --.", metavar="COMMAND")],
    data_dir: DataDir = DEFAULT_DATA_DIR,
    container: ContainerName = None,
    stdin: Annotated[bool, typer.Option("--stdin", "-i", help="Pass our input on.")] = False,
    tty: Annotated[bool, typer.Option("--tty", "-t", help="Give it a terminal (with -i).")] = False,
) -> None:
    """Run a command in a container and exit with its exit code."""
    from pykubelet.cli.exec import ExecOptions, run_exec

    sys.exit(run_exec(data_dir, ExecOptions(pod, command, container, stdin=stdin, tty=tty)))


@app.command()
def attach(
    pod: PodName,
    data_dir: DataDir = DEFAULT_DATA_DIR,
    container: ContainerName = None,
    stdin: Annotated[bool, typer.Option("--stdin", "-i", help="Pass our input on.")] = False,
    tty: Annotated[bool, typer.Option("--tty", "-t", help="Our terminal is its terminal (with -i).")] = False,
) -> None:
    """Show the output of a container's main process from now on, and pass our input to it."""
    from pykubelet.cli.exec import AttachOptions, run_attach

    sys.exit(run_attach(data_dir, AttachOptions(pod, container, stdin=stdin, tty=tty)))


@app.command("port-forward")
def port_forward(
    pod: PodName,
    ports: Annotated[
        list[str],
        typer.Argument(help="PORT of the pod, LOCAL:PORT, or :PORT for any local port.", metavar="PORT"),
    ],
    data_dir: DataDir = DEFAULT_DATA_DIR,
    address: Annotated[str, typer.Option(help="Local address to listen on.")] = "127.0.0.1",
) -> None:
    """Forward local ports to ports of a pod until interrupted."""
    from pykubelet.cli.port_forward import PortForwardOptions, run_port_forward

    sys.exit(run_port_forward(data_dir, PortForwardOptions(pod, ports, address)))


@app.command()
def describe(pod: PodName, data_dir: DataDir = DEFAULT_DATA_DIR) -> None:
    """Show a pod in detail: spec, container states, events and timeline."""
    from pykubelet.cli.describe import run_describe

    sys.exit(run_describe(data_dir, pod))


@app.command()
def restart(
    pod: PodName,
    container: Annotated[str | None, typer.Argument(help="Only this container.", show_default=False)] = None,
    data_dir: DataDir = DEFAULT_DATA_DIR,
) -> None:
    """Restart a pod's containers in place; the pod keeps its IP address and volumes."""

    from pykubelet.cli.run import run_restart

    sys.exit(run_restart(data_dir, pod, container))


@app.command()
def doctor(
    data_dir: DataDir = DEFAULT_DATA_DIR,
    endpoint: Endpoint = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the findings as JSON.")] = False,
) -> None:
    """Check whether this host can run a node; print a remedy for each problem."""
    from pykubelet.cli.doctor import run_doctor

    sys.exit(run_doctor(data_dir, endpoint, as_json))


@app.command()
def version() -> None:
    """Print the version."""
    from pykubelet.config.help import version_line

    print(version_line())


@config_app.command("print", context_settings=FLAGS_FOLLOW)
def config_print(context: typer.Context) -> None:
    """Print the effective configuration of a `kubelet` command line as YAML, with every field."""
    from pykubelet.cli.config import print_effective

    sys.exit(print_effective(context.args))


@config_app.command("validate")
def config_validate(files: Annotated[list[Path], typer.Argument(help="Configuration files.")]) -> None:
    """Validate configuration files and report every problem with its field."""
    from pykubelet.cli.config import validate_files

    sys.exit(validate_files(files))


@config_app.command("reload")
def config_reload(data_dir: DataDir = DEFAULT_DATA_DIR) -> None:
    """Reload the configuration of the running node; print what changed and what requires a restart."""
    from pykubelet.cli.config import reload

    sys.exit(reload(data_dir))


@config_app.command("convert-flags", context_settings=FLAGS_FOLLOW)
def config_convert(context: typer.Context) -> None:
    """Convert a `kubelet` command line to an equivalent configuration file."""
    from pykubelet.cli.config import convert

    sys.exit(convert(context.args))


def _duration(text: str, option: str) -> Duration:
    from pykubelet.api.duration import Duration

    try:
        return Duration.parse(text)
    except ValueError as err:
        raise typer.BadParameter(str(err), param_hint=option) from err
