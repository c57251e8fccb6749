"""Command line of pods: ps, top, describe, logs, exec, attach, debug, port-forward and restart."""

from __future__ import annotations

import sys
from enum import StrEnum
from typing import Annotated

import typer

from pykubelet.cli.options import (
    ContainerName,
    NodeDataDir,
    NodeSelection,
    PodName,
    RootDir,
    parse_duration,
)
from pykubelet.cli.output import Output, OutputOption, WatchOption, require_table

app = typer.Typer()


MIN_INTERVAL_SECONDS, MAX_INTERVAL_SECONDS = 1, 3600
"""Bounds of `top --interval`."""


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


@app.command()
def ps(
    data_dir: NodeDataDir = None,
    root_dir: RootDir = None,
    watch: WatchOption = False,
    output: OutputOption = Output.TABLE,
) -> None:
    """Show the node's pods."""
    from pykubelet.cli.pods.ps import run_ps

    require_table(watch, output)
    sys.exit(run_ps(NodeSelection(data_dir, root_dir), watch=watch, output=output))


@app.command()
def top(
    pod: Annotated[
        str | None,
        typer.Argument(help="Show the containers of this pod; named as in the other commands."),
    ] = None,
    data_dir: NodeDataDir = None,
    root_dir: RootDir = None,
    node: Annotated[
        bool, typer.Option("--node", help="Show the node and its system containers instead of pods.")
    ] = False,
    calls: Annotated[
        bool,
        typer.Option("--calls", help="Show the kubelet's calls to the runtime and the API server instead."),
    ] = False,
    sort: Annotated[TopSort, typer.Option("--sort", help="What comes first: the largest.")] = TopSort.CPU,
    watch: Annotated[
        bool, typer.Option("--watch", "-w", help="Update until Ctrl-C; network traffic is per second.")
    ] = False,
    interval: Annotated[str, typer.Option("--interval", help="Time between updates, with -w.")] = "5s",
    output: OutputOption = Output.TABLE,
) -> None:
    """Show CPU, memory, network and storage usage of pods, of a pod's containers, or of the node."""
    from pykubelet.cli.pods.top import TopOptions, run_top

    if pod is not None and node:
        raise typer.BadParameter("--node shows the node, not a pod: leave out one of the two")
    if calls and (pod is not None or node):
        raise typer.BadParameter("--calls shows no usage: leave out --node and the pod")
    require_table(watch, output)
    if calls:
        from pykubelet.cli.pods.calls import run_calls

        sys.exit(run_calls(NodeSelection(data_dir, root_dir), output, watch=watch))
    seconds = parse_duration(interval, "--interval").seconds
    if not MIN_INTERVAL_SECONDS <= seconds <= MAX_INTERVAL_SECONDS:
        raise typer.BadParameter(f"{interval!r} is not between 1s and 1h", param_hint="--interval")
    options = TopOptions(
        pod=pod, node=node, sort=sort.value, output=output.value, watch=watch, interval=seconds
    )
    sys.exit(run_top(NodeSelection(data_dir, root_dir), options))


@app.command()
def describe(pod: PodName, data_dir: NodeDataDir = None, root_dir: RootDir = None) -> None:
    """Show a pod in detail: spec, container states, events and timeline."""
    from pykubelet.cli.pods.describe import run_describe

    sys.exit(run_describe(NodeSelection(data_dir, root_dir), pod))


@app.command()
def events(
    pod: Annotated[
        str | None, typer.Argument(help="Only events of this pod, which may have been removed.")
    ] = None,
    data_dir: NodeDataDir = None,
    root_dir: RootDir = None,
    follow: Annotated[
        bool, typer.Option("--follow", "-f", "--watch", "-w", help="Go on with new events.")
    ] = False,
    since: Annotated[str | None, typer.Option("--since", help="Only events this young, such as 5m.")] = None,
    warnings: Annotated[bool, typer.Option("--warnings", help="Only warnings.")] = False,
    node: Annotated[bool, typer.Option("--node", help="Only events of the node itself.")] = False,
    output: OutputOption = Output.TABLE,
) -> None:
    """Show the events of pods and of the node since the kubelet started."""
    from pykubelet.cli.pods.events import EventOptions, run_events

    if pod is not None and node:
        raise typer.BadParameter("--node shows the node, not a pod: leave out one of the two")
    if follow and output in (Output.YAML, Output.NAME):
        raise typer.BadParameter("--follow prints lines, or JSON with -o json: leave out one of the two")
    age = parse_duration(since, "--since").seconds if since is not None else None
    options = EventOptions(pod, node, follow, warnings, age, output)
    sys.exit(run_events(NodeSelection(data_dir, root_dir), options))


@app.command()
def logs(
    pod: PodName,
    data_dir: NodeDataDir = None,
    root_dir: RootDir = None,
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
    from pykubelet.cli.pods.logs import LogOptions, run_logs

    age = parse_duration(since, "--since") if since is not None else None
    sys.exit(
        run_logs(
            NodeSelection(data_dir, root_dir),
            LogOptions(pod, container, follow, previous, tail, timestamps, age),
        )
    )


@app.command("exec")
def exec_command(
    pod: PodName,
    command: Annotated[list[str], typer.Argument(help="The command, after --.", metavar="COMMAND")],
    data_dir: NodeDataDir = None,
    root_dir: RootDir = None,
    container: ContainerName = None,
    stdin: Annotated[bool, typer.Option("--stdin", "-i", help="Pass our input on.")] = False,
    tty: Annotated[bool, typer.Option("--tty", "-t", help="Give it a terminal (with -i).")] = False,
) -> None:
    """Run a command in a container and exit with its exit code."""
    from pykubelet.cli.pods.exec import ExecOptions, run_exec

    sys.exit(
        run_exec(
            NodeSelection(data_dir, root_dir), ExecOptions(pod, command, container, stdin=stdin, tty=tty)
        )
    )


@app.command()
def cp(
    source: Annotated[str, typer.Argument(help="POD:PATH, NAMESPACE/POD:PATH, or a local PATH.")],
    target: Annotated[str, typer.Argument(help="Where to: the other one of the two forms.")],
    data_dir: NodeDataDir = None,
    root_dir: RootDir = None,
    container: ContainerName = None,
) -> None:
    """Copy files and directories from or to a running container; its image needs no programs."""
    from pykubelet.cli.pods.cp import CopyOptions, run_cp

    sys.exit(run_cp(NodeSelection(data_dir, root_dir), CopyOptions(source, target, container)))


@app.command()
def attach(
    pod: PodName,
    data_dir: NodeDataDir = None,
    root_dir: RootDir = None,
    container: ContainerName = None,
    stdin: Annotated[bool, typer.Option("--stdin", "-i", help="Pass our input on.")] = False,
    tty: Annotated[bool, typer.Option("--tty", "-t", help="Our terminal is its terminal (with -i).")] = False,
) -> None:
    """Show the output of a container's main process from now on, and pass our input to it."""
    from pykubelet.cli.pods.exec import AttachOptions, run_attach

    sys.exit(
        run_attach(NodeSelection(data_dir, root_dir), AttachOptions(pod, container, stdin=stdin, tty=tty))
    )


@app.command()
def debug(
    pod: PodName,
    command: Annotated[
        list[str] | None,
        typer.Argument(help="The command, after --; otherwise that of the image.", metavar="COMMAND"),
    ] = None,
    data_dir: NodeDataDir = None,
    root_dir: RootDir = None,
    image: Annotated[
        str | None,
        typer.Option("--image", help="Its image; otherwise busybox of `pykubelet up`.", show_default=False),
    ] = None,
    target: Annotated[
        str | None,
        typer.Option("--target", help="See the processes of this container.", show_default=False),
    ] = None,
    stdin: Annotated[bool, typer.Option("--stdin", "-i", help="Pass our input on.")] = False,
    tty: Annotated[bool, typer.Option("--tty", "-t", help="Give it a terminal (with -i).")] = False,
    timeout: Annotated[str, typer.Option("--timeout", help="How long it may take to start.")] = "2m",
) -> None:
    """Run a command in a new container of a running pod, which needs no programs of its own."""
    from pykubelet.cli.pods.debug import DebugOptions, run_debug

    if command is None and not stdin:
        raise typer.BadParameter("add -it for a shell, or a command after --")
    seconds = parse_duration(timeout, "--timeout").seconds
    options = DebugOptions(pod, command or (), image, target, stdin=stdin, tty=tty, timeout=seconds)
    sys.exit(run_debug(NodeSelection(data_dir, root_dir), options))


@app.command("port-forward")
def port_forward(
    pod: PodName,
    ports: Annotated[
        list[str],
        typer.Argument(help="PORT of the pod, LOCAL:PORT, or :PORT for any local port.", metavar="PORT"),
    ],
    data_dir: NodeDataDir = None,
    root_dir: RootDir = None,
    address: Annotated[str, typer.Option(help="Local address to listen on.")] = "127.0.0.1",
) -> None:
    """Forward local ports to ports of a pod until interrupted."""
    from pykubelet.cli.pods.port_forward import PortForwardOptions, run_port_forward

    sys.exit(run_port_forward(NodeSelection(data_dir, root_dir), PortForwardOptions(pod, ports, address)))


@app.command()
def restart(
    pod: PodName,
    container: Annotated[str | None, typer.Argument(help="Only this container.", show_default=False)] = None,
    data_dir: NodeDataDir = None,
    root_dir: RootDir = None,
) -> None:
    """Restart a pod's containers in place; the pod keeps its IP address and volumes."""

    from pykubelet.cli.manifests.run import run_restart

    sys.exit(run_restart(NodeSelection(data_dir, root_dir), pod, container))
