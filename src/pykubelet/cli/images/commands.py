"""Command line of images and registries: images ls, pull, load, save, rm, prune, (un)pin; login, logout."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from pykubelet.cli.options import NodeDataDir, NodeSelection, RootDir
from pykubelet.cli.output import Output, WatchOption, require_table

app = typer.Typer()
images_app = typer.Typer(
    help="Show, pull, load, save, remove and pin the node's images.", no_args_is_help=True
)
app.add_typer(images_app, name="images")

ImageArguments = Annotated[
    list[str],
    typer.Argument(
        help="Names with tag or digest, or the beginnings of ids.", metavar="IMAGE...", show_default=False
    ),
]


@images_app.command("ls")
def list_images(
    names: Annotated[
        list[str] | None,
        typer.Argument(help="Only these images.", metavar="[IMAGE]...", show_default=False),
    ] = None,
    data_dir: NodeDataDir = None,
    root_dir: RootDir = None,
    watch: WatchOption = False,
    output: Annotated[
        Output,
        typer.Option("--output", "-o", help="A table, one with digests, documents, or only names."),
    ] = Output.TABLE,
) -> None:
    """Show the node's images: size, pins, pods that use them, last use."""
    from pykubelet.cli.images.listing import run_list

    require_table(watch, output)
    sys.exit(run_list(NodeSelection(data_dir, root_dir), names or (), output.value, watch=watch))


@images_app.command()
def pull(
    image: Annotated[str, typer.Argument(help="Its name, with tag or digest.", show_default=False)],
    data_dir: NodeDataDir = None,
    root_dir: RootDir = None,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Show no progress.")] = False,
) -> None:
    """Pull an image with the node's credentials, and show the progress; Ctrl-C stops the pull."""
    from pykubelet.cli.images.pull import run_pull

    sys.exit(run_pull(NodeSelection(data_dir, root_dir), image, quiet=quiet))


@images_app.command()
def load(
    file: Annotated[
        str, typer.Argument(help="An OCI or docker archive, also with gzip; - is standard input.")
    ],
    data_dir: NodeDataDir = None,
    root_dir: RootDir = None,
    name: Annotated[
        str,
        typer.Option("--name", help="Repository of images that have only a tag, such as registry/app."),
    ] = "",
) -> None:
    """Load the images of an archive, and pin them, so that garbage collection keeps them."""
    from pykubelet.cli.images.archives import run_load

    sys.exit(run_load(NodeSelection(data_dir, root_dir), file, name))


@images_app.command()
def save(
    names: ImageArguments,
    output: Annotated[str, typer.Option("--output", "-o", help="The file; - is standard output.")],
    data_dir: NodeDataDir = None,
    root_dir: RootDir = None,
    force: Annotated[bool, typer.Option("--force", "-f", help="Replace the file if it exists.")] = False,
) -> None:
    """Write images to an OCI archive, which `load`, docker and podman can read."""
    from pykubelet.cli.images.archives import run_save

    sys.exit(run_save(NodeSelection(data_dir, root_dir), names, output, force=force))


@images_app.command("rm")
def remove(
    names: ImageArguments,
    data_dir: NodeDataDir = None,
    root_dir: RootDir = None,
    force: Annotated[
        bool, typer.Option("--force", "-f", help="Also if the image is pinned, or containers use it.")
    ] = False,
) -> None:
    """Remove images with all their names."""
    from pykubelet.cli.images.removal import run_remove

    sys.exit(run_remove(NodeSelection(data_dir, root_dir), names, force=force))


@images_app.command()
def prune(
    data_dir: NodeDataDir = None,
    root_dir: RootDir = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only show what would be removed.")] = False,
) -> None:
    """Remove the images that no container uses, except pinned and new ones."""
    from pykubelet.cli.images.removal import run_prune

    sys.exit(run_prune(NodeSelection(data_dir, root_dir), dry_run=dry_run))


@images_app.command()
def pin(names: ImageArguments, data_dir: NodeDataDir = None, root_dir: RootDir = None) -> None:
    """Pin images, so that garbage collection keeps them."""
    from pykubelet.cli.images.removal import run_pin

    sys.exit(run_pin(NodeSelection(data_dir, root_dir), names, pinned=True))


@images_app.command()
def unpin(names: ImageArguments, data_dir: NodeDataDir = None, root_dir: RootDir = None) -> None:
    """Remove the pins of images."""
    from pykubelet.cli.images.removal import run_pin

    sys.exit(run_pin(NodeSelection(data_dir, root_dir), names, pinned=False))


@app.command()
def login(
    registry: Annotated[str, typer.Argument(help="Its host, such as ghcr.io.", show_default=False)],
    data_dir: NodeDataDir = None,
    root_dir: RootDir = None,
    user: Annotated[str, typer.Option("--username", "-u", help="The user; else it is asked for.")] = "",
    password_stdin: Annotated[
        bool, typer.Option("--password-stdin", help="Read the password or token from standard input.")
    ] = False,
    ca_file: Annotated[
        Path | None,
        typer.Option(
            "--ca-file", help="CA certificates of the registry, for this check.", show_default=False
        ),
    ] = None,
    no_check: Annotated[
        bool, typer.Option("--no-check", help="Store the credentials without asking the registry.")
    ] = False,
) -> None:
    """Store the credentials of a registry for all pods of the node, from the next pull on."""
    from pykubelet.cli.images.login import LoginOptions, run_login

    options = LoginOptions(registry, user, password_stdin, check=not no_check, ca_file=ca_file)
    sys.exit(run_login(NodeSelection(data_dir, root_dir), options))


@app.command()
def logout(
    registry: Annotated[str, typer.Argument(help="Its host, as for login.", show_default=False)],
    data_dir: NodeDataDir = None,
    root_dir: RootDir = None,
) -> None:
    """Remove the node's credentials of a registry."""
    from pykubelet.cli.images.login import run_logout

    sys.exit(run_logout(NodeSelection(data_dir, root_dir), registry))
