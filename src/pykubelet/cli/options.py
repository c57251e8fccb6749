"""Options and arguments that several commands of `pykubelet` have."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from pykubelet.api.duration import Duration

DEFAULT_DATA_DIR = Path("/var/lib/pykubelet")
DATA_DIR_VARIABLE = "PYKUBELET_DATA_DIR"
ROOT_DIR_VARIABLE = "PYKUBELET_ROOT_DIR"


@dataclass(frozen=True, slots=True)
class NodeSelection:
    """The options of a command that select the node: at most one is set."""

    data_dir: Path | None = None
    root_dir: Path | None = None


FLAGS_FOLLOW = {"allow_extra_args": True, "ignore_unknown_options": True}
DataDir = Annotated[
    Path, typer.Option("--data-dir", help="Where everything of this node lives.", envvar=DATA_DIR_VARIABLE)
]
NodeDataDir = Annotated[
    Path | None,
    typer.Option(
        "--data-dir",
        help=f"Data directory of a node of `pykubelet up`, also from {DATA_DIR_VARIABLE}.",
        show_default=False,
    ),
]
RootDir = Annotated[
    Path | None,
    typer.Option(
        "--root-dir",
        help=f"Root directory of a node of the `kubelet` program, also from {ROOT_DIR_VARIABLE}.",
        show_default=False,
    ),
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


def parse_duration(text: str, option: str) -> Duration:
    """Parse a duration such as 90s or 5m. Raises BadParameter with the option's name."""
    from pykubelet.api.duration import Duration

    try:
        return Duration.parse(text)
    except ValueError as err:
        raise typer.BadParameter(str(err), param_hint=option) from err
