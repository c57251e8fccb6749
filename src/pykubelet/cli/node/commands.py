"""Command line of the node: up, down, doctor, self-test, pressure, version, config and dev."""

from __future__ import annotations

import sys
from dataclasses import replace
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from pykubelet.cli.node.dev import dev_app
from pykubelet.cli.options import (
    DEFAULT_DATA_DIR,
    FLAGS_FOLLOW,
    DataDir,
    Endpoint,
    NodeDataDir,
    NodeSelection,
    RootDir,
    parse_duration,
)
from pykubelet.cli.output import Output, OutputOption

app = typer.Typer()


config_app = typer.Typer(
    help="Look at, check, convert and reload a kubelet's configuration.", no_args_is_help=True
)
app.add_typer(config_app, name="config")
app.add_typer(dev_app, name="dev")


class Shell(StrEnum):
    """Shell of a completion script."""

    BASH = "bash"
    ZSH = "zsh"
    FISH = "fish"


@app.command(context_settings=FLAGS_FOLLOW)
def up(
    context: typer.Context,
    data_dir: DataDir = DEFAULT_DATA_DIR,
    endpoint: Endpoint = None,
    verbosity: Annotated[int, typer.Option("-v", help="How much to say (0 to 10).")] = 0,
    install: Annotated[
        bool, typer.Option("--install", help="Run it as a service of systemd, with these flags.")
    ] = False,
    uninstall: Annotated[
        bool, typer.Option("--uninstall", help="Remove that service; containers keep running.")
    ] = False,
) -> None:
    """Start the node in the foreground; Ctrl-C stops the kubelet and leaves containers running.

    Any flag of the `kubelet` command may follow and overrides what `up` configures.
    """
    if install and uninstall:
        raise typer.BadParameter("--install and --uninstall exclude each other: leave out one of the two")
    if install or uninstall:
        from pykubelet.cli.node.service import run_install, run_uninstall

        if uninstall:
            sys.exit(run_uninstall(data_dir))
        sys.exit(run_install(data_dir, endpoint, verbosity, context.args))
    from pykubelet.cli.node.up import run_up

    sys.exit(run_up(data_dir, endpoint, verbosity, context.args))


@app.command()
def down(
    data_dir: DataDir = DEFAULT_DATA_DIR,
    volumes: Annotated[
        bool, typer.Option("--volumes", help="Delete the data of persistent volume claims, too.")
    ] = False,
    keep_data: Annotated[
        bool, typer.Option("--keep-data", help="Keep the files: manifests, images, logs and volumes.")
    ] = False,
) -> None:
    """Remove everything that `up` created: containers, mounts, network, cgroups, files."""
    from pykubelet.cli.node.up import run_down

    if volumes and keep_data:
        raise typer.BadParameter("--volumes deletes what --keep-data keeps: leave out one of the two")
    sys.exit(run_down(data_dir, volumes=volumes, keep_data=keep_data))


@app.command()
def doctor(
    data_dir: NodeDataDir = None,
    root_dir: RootDir = None,
    endpoint: Endpoint = None,
    config: Annotated[
        Path | None,
        typer.Option(
            "--config",
            help="Check for a kubelet with this configuration file, instead of that of the running node "
            "or the defaults of `up`.",
            show_default=False,
        ),
    ] = None,
    output: OutputOption = Output.TABLE,
    as_json: Annotated[bool, typer.Option("--json", help="The same as -o json.")] = False,
) -> None:
    """Check whether this host can run a node; print a remedy for each problem."""
    from pykubelet.cli.node.doctor import run_doctor

    if as_json and output not in (Output.TABLE, Output.JSON):
        raise typer.BadParameter("--json and --output choose different formats: leave out one of the two")
    output = Output.JSON if as_json else output
    sys.exit(run_doctor(NodeSelection(data_dir, root_dir), endpoint, output, config))


@app.command()
def pressure(
    data_dir: NodeDataDir = None,
    root_dir: RootDir = None,
    output: OutputOption = Output.TABLE,
) -> None:
    """Show how far the node is from each eviction threshold, and which pod would be evicted first."""
    from pykubelet.cli.node.pressure import run_pressure

    sys.exit(run_pressure(NodeSelection(data_dir, root_dir), output))


@app.command()
def certs(
    data_dir: NodeDataDir = None,
    root_dir: RootDir = None,
    output: OutputOption = Output.TABLE,
    warn: Annotated[
        str, typer.Option("--warn", help="Remaining life of what the kubelet does not rotate.")
    ] = "720h",
) -> None:
    """Show the node's certificates and their remaining life; exit with 3 if one needs attention."""
    from pykubelet.cli.node.certs import run_certs

    seconds = parse_duration(warn, "--warn").seconds
    sys.exit(run_certs(NodeSelection(data_dir, root_dir), output, seconds))


@app.command("self-test")
def self_test(
    data_dir: NodeDataDir = None,
    root_dir: RootDir = None,
    image: Annotated[
        str | None,
        typer.Option(
            "--image",
            help="An image with the programs of busybox; otherwise that of `pykubelet up`.",
            show_default=False,
        ),
    ] = None,
    timeout: Annotated[
        str, typer.Option("--timeout", help="How long the pod may take to start, and to go.")
    ] = "2m",
    output: Annotated[
        Output, typer.Option("--output", "-o", help="A line per check, a document, or only names of checks.")
    ] = Output.TABLE,
) -> None:
    """Run a scratch pod on the node and verify start, network, exec, volume, logs, readiness and removal."""
    from pykubelet.cli.node.self_test import SelfTestOptions, run_self_test

    seconds = parse_duration(timeout, "--timeout").seconds
    options = SelfTestOptions(timeout=seconds, output=output)
    if image is not None:
        options = replace(options, image=image)
    sys.exit(run_self_test(NodeSelection(data_dir, root_dir), options))


@app.command("support-bundle")
def support_bundle(
    data_dir: NodeDataDir = None,
    root_dir: RootDir = None,
    file: Annotated[
        Path | None, typer.Option("--file", "-o", help="The archive, a new file.", show_default=False)
    ] = None,
) -> None:
    """Collect what explains the node's state into an archive, with secrets masked."""
    from pykubelet.cli.node.support_bundle import run_support_bundle

    sys.exit(run_support_bundle(NodeSelection(data_dir, root_dir), file))


@app.command()
def completion(
    shell: Annotated[Shell, typer.Argument(help="The shell.", show_default=False)],
) -> None:
    """Print the completion script of a shell, for example: source <(pykubelet completion bash)."""
    from pykubelet.cli.completion import script

    print(script(shell.value), end="")


@app.command("__complete", hidden=True)
def complete(
    kind: Annotated[str, typer.Argument()],
    of: Annotated[str | None, typer.Argument()] = None,
    data_dir: NodeDataDir = None,
    root_dir: RootDir = None,
) -> None:
    """Print the names that a completion script offers."""
    from pykubelet.cli.completion import limit_time, names

    limit_time()
    for name in names(NodeSelection(data_dir, root_dir), kind, of):
        print(name)


@app.command()
def version() -> None:
    """Print the version."""
    from pykubelet.config.help import version_line

    print(version_line())


@config_app.command("print", context_settings=FLAGS_FOLLOW)
def config_print(context: typer.Context) -> None:
    """Print the effective configuration of a `kubelet` command line as YAML, with every field."""
    from pykubelet.cli.node.config import print_effective

    sys.exit(print_effective(context.args))


@config_app.command("validate")
def config_validate(files: Annotated[list[Path], typer.Argument(help="Configuration files.")]) -> None:
    """Validate configuration files and report every problem with its field."""
    from pykubelet.cli.node.config import validate_files

    sys.exit(validate_files(files))


@config_app.command("reload")
def config_reload(data_dir: NodeDataDir = None, root_dir: RootDir = None) -> None:
    """Reload the configuration of the running node; print what changed and what requires a restart."""
    from pykubelet.cli.node.config import reload

    sys.exit(reload(NodeSelection(data_dir, root_dir)))


@config_app.command("convert-flags", context_settings=FLAGS_FOLLOW)
def config_convert(context: typer.Context) -> None:
    """Convert a `kubelet` command line to an equivalent configuration file."""
    from pykubelet.cli.node.config import convert

    sys.exit(convert(context.args))
