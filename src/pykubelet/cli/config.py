"""`pykubelet config print|validate|convert-flags`: prints the results of the config package."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

from pykubelet.cli.errors import print_error
from pykubelet.config.codec import to_yaml
from pykubelet.config.convert import convert_flags
from pykubelet.config.errors import ConfigError
from pykubelet.config.load import load


def print_effective(argv: Sequence[str]) -> int:
    """Print the effective configuration of a `kubelet` with these flags; return the exit code."""
    try:
        loaded = load(argv)
    except ConfigError as err:
        return print_error("pykubelet config print", err)
    for warning in loaded.warnings:
        print(f"warning: {warning}", file=sys.stderr)
    print(to_yaml(loaded.config), end="")
    return 0


def validate_files(files: Sequence[Path]) -> int:
    """Validate each file separately, as `--config` would load it; return the exit code."""
    code = 0
    for file in files:
        try:
            load(["--config", str(file)])
        except ConfigError as err:
            code = print_error(str(file), err)
        else:
            print(f"{file}: ok")
    return code


def convert(argv: Sequence[str]) -> int:
    """Print the configuration file, and on standard error the remaining flags; return the exit code."""
    try:
        document, remaining, notes = convert_flags(argv)
    except ConfigError as err:
        return print_error("pykubelet config convert-flags", err)
    print(document, end="")
    for note in notes:
        print(f"note: {note}", file=sys.stderr)
    print("run with: kubelet --config FILE " + shlex.join(remaining), file=sys.stderr)
    return 0
