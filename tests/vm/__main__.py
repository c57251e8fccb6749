"""`python -m tests.vm`: the tests of `tests/vm/guest` in a virtual machine with systemd and cgroup v2.

Arguments are pytest's; without any, all of them are run. Exits as pytest in the guest did.
"""

import signal
import sys

from tests.vm.machine import run, why_not


def main() -> int:
    """Entry point; returns the exit code."""
    if reason := why_not():
        print(f"vmtest: {reason}", file=sys.stderr)
        return 3
    # So that what was made is removed, whoever ends this.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    try:
        return run(sys.argv[1:] or ["-q", "tests/vm/guest"])
    except RuntimeError as err:
        print(f"vmtest: {err}", file=sys.stderr)
        return 4


if __name__ == "__main__":
    sys.exit(main())
