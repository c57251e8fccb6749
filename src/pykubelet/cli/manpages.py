"""Man pages, generated from the commands of `pykubelet` and the flag table of `kubelet`.

`python -m pykubelet.cli.manpages DIRECTORY` writes `pykubelet.1`, `pykubelet-COMMAND.1` for each command and
`kubelet.8`. The pages have no date, so that a build can be reproduced.
"""

from __future__ import annotations

import sys
import textwrap
from itertools import groupby
from pathlib import Path

import pykubelet
from pykubelet.cli.command_tree import Command, Parameter, command_tree
from pykubelet.cli.exit_codes import EXIT_CODES, EXIT_CODES_OF_PROCESSES
from pykubelet.cli.options import DATA_DIR_VARIABLE, DEFAULT_DATA_DIR, ROOT_DIR_VARIABLE

_ENVIRONMENT = (
    (DATA_DIR_VARIABLE, f"Data directory of the node, instead of {DEFAULT_DATA_DIR}."),
    (ROOT_DIR_VARIABLE, "Root directory of the kubelet whose node is used."),
    ("NO_COLOR", "Without colours, if set."),
)


def write_pages(directory: Path) -> list[Path]:
    """Write all pages, and return their paths. Raises OSError."""
    directory.mkdir(parents=True, exist_ok=True)
    pages = {f"{_page_name(command)}.1": command_page(command) for command in command_tree().walk()}
    pages["kubelet.8"] = kubelet_page()
    written = []
    for name, text in pages.items():
        path = directory / name
        path.write_text(text, encoding="utf-8")
        written.append(path)
    return written


def command_page(command: Command) -> str:
    """Return the page of a command, or of the program."""
    name = _page_name(command)
    summary = _sentence(command.help)
    lines = [_title(name, 1), ".SH NAME", f"{_escaped(name)} \\- {_escaped(summary)}", ".SH SYNOPSIS"]
    lines += [f".B {_escaped(' '.join(('pykubelet', *command.path)))}", *_synopsis(command)]
    lines += [".SH DESCRIPTION", *_paragraphs(command.help)]
    if command.commands:
        lines.append(".SH COMMANDS")
        for inner in command.commands:
            lines += [
                ".TP",
                f".BR {_escaped(_page_name(inner))} (1)",
                _escaped(_sentence(inner.help)),
            ]
    if command.arguments:
        lines.append(".SH ARGUMENTS")
        for argument in command.arguments:
            lines += [".TP", f".I {_escaped(argument.name)}", _escaped(argument.help or "See above.")]
    lines.append(".SH OPTIONS")
    for option in command.options:
        lines += [".TP", _option(option), *_option_text(option)]
    lines += [".TP", ".B \\-\\-help", "Show the options."]
    if not command.path:
        lines += [".SH EXIT STATUS", *_pairs(EXIT_CODES), ".PP", _escaped(_plain(EXIT_CODES_OF_PROCESSES))]
        lines += [".SH ENVIRONMENT", *_pairs(_ENVIRONMENT)]
    others = ["pykubelet"] if command.path else []
    see = [f".BR {_escaped(other)} (1)," for other in others] + [".BR kubelet (8)"]
    return "\n".join([*lines, ".SH SEE ALSO", *see]) + "\n"


def kubelet_page() -> str:
    """Return the page of the program `kubelet`."""
    from pykubelet.config.flags.flag_table import FLAGS, default_text, field_path
    from pykubelet.config.load import baseline

    defaults = baseline()
    lines = [
        _title("kubelet", 8),
        ".SH NAME",
        "kubelet \\- Kubernetes node agent",
        ".SH SYNOPSIS",
        ".B kubelet",
        "[\\fIflags\\fR]",
        ".SH DESCRIPTION",
        "Runs the pods that the API server assigns to this node, and the static pods of a directory or URL, "
        "and keeps them healthy.",
        "A flag sets the field of the configuration file in brackets; set it there where you can.",
    ]
    for title, flags in groupby(FLAGS, lambda flag: flag.group):
        lines += [".SS " + _escaped(title)]
        for flag in flags:
            kind = "" if flag.kind.bare else f" \\fI{_escaped(flag.kind.name)}\\fR"
            short = f"\\fB\\-{flag.short}\\fR, " if flag.short else ""
            text = " ".join(flag.help.split())
            field = f" [{field_path(flag.field)}]" if flag.field else ""
            default = default_text(flag, defaults)
            more = f" (default {default})" if default else ""
            lines += [".TP", f"{short}\\fB\\-\\-{_escaped(flag.name)}\\fR{kind}"]
            lines += [_escaped(f"{text}{more}{field}")]
    return "\n".join([*lines, ".SH SEE ALSO", ".BR pykubelet (1)"]) + "\n"


def _page_name(command: Command) -> str:
    return "-".join(("pykubelet", *command.path))


def _title(name: str, section: int) -> str:
    # Words such as lists of values have no place to break: they are not adjusted to the right.
    version = f"pykubelet {pykubelet.__version__}"
    return f'.TH "{_escaped(name.upper())}" "{section}" "" "{version}" "pykubelet"\n.ad l'


def _synopsis(command: Command) -> list[str]:
    words = ["[\\fIoptions\\fR]"] + (["\\fIcommand\\fR"] if command.commands else [])
    for argument in command.arguments:
        text = f"\\fI{_escaped(argument.name)}\\fR" + (" ..." if argument.repeated else "")
        words.append(text if argument.required else f"[{text}]")
    return [" ".join(words)]


def _option(option: Parameter) -> str:
    value = f" \\fI{_escaped('|'.join(option.choices) or option.name)}\\fR" if option.takes_value else ""
    return ", ".join(f"\\fB{_escaped(text)}\\fR{value}" for text in option.options)


def _option_text(option: Parameter) -> list[str]:
    default = f" (default {option.default})" if option.default and option.takes_value else ""
    return [_escaped(f"{option.help or 'See above.'}{default}")]


def _paragraphs(text: str) -> list[str]:
    lines: list[str] = []
    for paragraph in textwrap.dedent(text).split("\n\n"):
        lines += [".PP", _escaped(" ".join(paragraph.split()))]
    return lines


def _pairs(pairs: tuple[tuple[str, str], ...]) -> list[str]:
    return [line for name, text in pairs for line in (".TP", f".B {_escaped(name)}", _escaped(_plain(text)))]


def _plain(text: str) -> str:
    return text.replace("`", "")


def _sentence(text: str) -> str:
    return " ".join(text.partition("\n\n")[0].split()).rstrip(".")


def _escaped(text: str) -> str:
    """Escape text for groff; a line must not begin with a control character."""
    text = text.replace("\\", "\\e").replace("-", "\\-").replace("\n", " ")
    text = "".join(one if one.isascii() else f"\\[u{ord(one):04X}]" for one in text)
    return f"\\&{text}" if text.startswith((".", "'")) else text


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("usage: python -m pykubelet.cli.manpages DIRECTORY")
    for page in write_pages(Path(sys.argv[1])):
        print(page)
