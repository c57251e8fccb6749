"""Command line of manifests: run, apply, get, rm, stop and start."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from pykubelet.cli.options import (
    NodeDataDir,
    NodeSelection,
    RootDir,
    parse_duration,
)
from pykubelet.cli.output import Output, WatchOption, require_table

app = typer.Typer()
Manifests = Annotated[
    list[str],
    typer.Argument(help="The name of an object, KIND/NAME, or a manifest's file name.", show_default=False),
]


@app.command()
def run(
    file: Annotated[
        Path, typer.Argument(help="A manifest, YAML or JSON: pods, workloads, ConfigMaps and Secrets.")
    ],
    data_dir: NodeDataDir = None,
    root_dir: RootDir = None,
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
    from pykubelet.cli.manifests.run import RunOptions, run_manifest

    seconds = parse_duration(timeout, "--timeout").seconds
    sys.exit(
        run_manifest(
            NodeSelection(data_dir, root_dir),
            RunOptions(file, detach=detach, replace=replace, timeout=seconds),
        )
    )


@app.command()
def apply(
    sources: Annotated[
        list[str],
        typer.Argument(help="A manifest file, a directory of them, a URL, or - for standard input."),
    ],
    data_dir: NodeDataDir = None,
    root_dir: RootDir = None,
    prune: Annotated[
        bool, typer.Option("--prune", help="Remove objects that the new version of a file does not have.")
    ] = False,
) -> None:
    """Put manifests onto the node; print what was created, configured or is unchanged."""
    from pykubelet.cli.manifests.apply import run_apply

    sys.exit(run_apply(NodeSelection(data_dir, root_dir), sources, prune=prune))


@app.command()
def get(
    kind: Annotated[
        str | None,
        typer.Argument(help="A kind such as deploy, pods or cm, or KIND/NAME.", show_default=False),
    ] = None,
    name: Annotated[str | None, typer.Argument(help="The name of an object.", show_default=False)] = None,
    data_dir: NodeDataDir = None,
    root_dir: RootDir = None,
    watch: WatchOption = False,
    output: Annotated[
        Output, typer.Option("--output", "-o", help="A table, or the objects as they are written.")
    ] = Output.TABLE,
) -> None:
    """Show the objects of the manifests and their state, also of stopped manifests."""
    from pykubelet.cli.manifests.get import run_get

    require_table(watch, output)
    sys.exit(run_get(NodeSelection(data_dir, root_dir), kind, name, output.value, watch=watch))


@app.command()
def rm(
    names: Manifests,
    data_dir: NodeDataDir = None,
    root_dir: RootDir = None,
    volumes: Annotated[
        bool, typer.Option("--volumes", help="Delete the data of the manifest's claims, too.")
    ] = False,
) -> None:
    """Remove manifests and stop their pods; the data of claims stays unless --volumes is given."""
    from pykubelet.cli.manifests.change import run_remove

    sys.exit(run_remove(NodeSelection(data_dir, root_dir), names, volumes=volumes))


@app.command()
def stop(names: Manifests, data_dir: NodeDataDir = None, root_dir: RootDir = None) -> None:
    """Stop the pods of manifests until `pykubelet start`, also across restarts of the host."""
    from pykubelet.cli.manifests.change import run_stop

    sys.exit(run_stop(NodeSelection(data_dir, root_dir), names))


@app.command()
def start(names: Manifests, data_dir: NodeDataDir = None, root_dir: RootDir = None) -> None:
    """Start stopped manifests."""
    from pykubelet.cli.manifests.change import run_start

    sys.exit(run_start(NodeSelection(data_dir, root_dir), names))
