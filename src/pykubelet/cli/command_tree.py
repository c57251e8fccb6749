"""The commands of `pykubelet` as plain data, for the completion scripts and the man pages."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum
from typing import Any


@dataclass(frozen=True, slots=True)
class Parameter:
    """An option, or an argument if it has no option strings."""

    name: str
    options: tuple[str, ...]
    help: str
    takes_value: bool
    required: bool
    repeated: bool
    choices: tuple[str, ...]
    default: str


@dataclass(frozen=True, slots=True)
class Command:
    """A command, or a group of commands; the path of the program itself is empty."""

    path: tuple[str, ...]
    help: str
    parameters: tuple[Parameter, ...]
    commands: tuple[Command, ...]

    @property
    def options(self) -> list[Parameter]:
        """The options of this command."""
        return [parameter for parameter in self.parameters if parameter.options]

    @property
    def arguments(self) -> list[Parameter]:
        """The positional arguments of this command."""
        return [parameter for parameter in self.parameters if not parameter.options]

    def walk(self) -> Iterator[Command]:
        """Yield this command and all below it."""
        yield self
        for command in self.commands:
            yield from command.walk()


def command_tree() -> Command:
    """Return the command tree of `pykubelet`, without hidden commands."""
    # Imported here: the application imports the command that prints this.
    from typer.main import get_command

    from pykubelet.cli.pykubelet import app

    return _command(get_command(app), ())


def _command(found: Any, path: tuple[str, ...]) -> Command:
    inner = getattr(found, "commands", {})
    return Command(
        path,
        (found.help or "").strip(),
        tuple(_parameter(one) for one in found.params if not getattr(one, "hidden", False)),
        tuple(_command(one, (*path, name)) for name, one in sorted(inner.items()) if not one.hidden),
    )


def _parameter(found: Any) -> Parameter:
    is_option = found.param_type_name == "option"
    default = found.default
    choices = tuple(str(one.value) for one in type(default)) if isinstance(default, Enum) else ()
    text = str(default.value) if isinstance(default, Enum) else "" if default is None else str(default)
    is_flag = bool(getattr(found, "is_flag", False))
    return Parameter(
        name=found.metavar or found.name.upper(),
        options=(*found.opts, *found.secondary_opts) if is_option else (),
        help=getattr(found, "help", None) or "",
        takes_value=is_option and not is_flag,
        required=found.required,
        repeated=found.nargs == -1,
        choices=choices,
        default="" if is_flag or callable(default) else text,
    )
