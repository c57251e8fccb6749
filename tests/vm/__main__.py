"""`python -m tests.vm [v1|v2] [ARGUMENTS]`: tests in a virtual machine with systemd and these cgroups.

Arguments are pytest's; without any, all tests for that machine are run, and without a version both machines
are booted, one after the other. Exits as pytest in the guest did.
"""

import signal
import sys

from tests.vm.machine import HIERARCHIES, run, why_not

FOLDERS = {"v2": "tests/vm/guest", "v1": "tests/vm/guest_v1"}


def main() -> int:
    """Entry point; returns the exit code."""
    if reason := why_not():
        print(f"vmtest: {reason}", file=sys.stderr)
        return 3
    # So that what was made is removed, whoever ends this.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    versions, arguments = [*FOLDERS], sys.argv[1:]
    if arguments and arguments[0] in HIERARCHIES:
        versions = [arguments.pop(0)]
    elif arguments:
        versions = ["v2"]
    try:
        # The worst counts.
        return max(run(arguments or ["-q", FOLDERS[version]], version) for version in versions)
    except RuntimeError as err:
        print(f"vmtest: {err}", file=sys.stderr)
        return 4


if __name__ == "__main__":
    sys.exit(main())
