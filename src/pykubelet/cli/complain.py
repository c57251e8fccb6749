"""How the programs say that something is wrong: a line each, on standard error."""

from __future__ import annotations

import sys

from pykubelet.config.errors import ConfigError


def complain(program: str, err: BaseException | str) -> int:
    """Print what is wrong and give the exit code."""
    if isinstance(err, ConfigError) and len(err.problems) > 1:
        print(f"{program}: {len(err.problems)} problems:", file=sys.stderr)
        for problem in err.problems:
            print(f"  - {problem}", file=sys.stderr)
    else:
        print(f"{program}: {err}", file=sys.stderr)
    return 1
