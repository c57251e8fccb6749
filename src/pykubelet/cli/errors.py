"""Error output of the programs: one line on standard error, or one line per problem of a configuration.

Errors may quote files, registries and runtimes: characters that a terminal would interpret are escaped.
"""

from __future__ import annotations

import sys

from pykubelet.config.errors import ConfigError
from pykubelet.util.text import escape_unprintable

EXIT_FINDING = 3
"""Exit code of a command that worked and found something to attend to."""


def print_error(program: str, err: BaseException | str) -> int:
    """Print the error to standard error, each problem of a ConfigError on its own line, and return 1."""
    if isinstance(err, ConfigError) and len(err.problems) > 1:
        print(f"{program}: {len(err.problems)} problems:", file=sys.stderr)
        for problem in err.problems:
            print(f"  - {escape_unprintable(str(problem))}", file=sys.stderr)
    else:
        print(f"{program}: {escape_unprintable(str(err))}", file=sys.stderr)
    return 1
