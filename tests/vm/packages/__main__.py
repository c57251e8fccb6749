"""`python -m tests.vm.packages`: the life of the Debian package in a virtual machine with a clean Debian."""

import shutil
import sys
import tempfile
from pathlib import Path

from tests.support.packages import NEXT_VERSION, built_deb, debian_image, why_no_packages
from tests.vm.machine import SHARED, Equipment, run_command, why_not

SECONDS = 2700.0
_COMMAND = (
    "unset PYTHONPATH PYTHONDONTWRITEBYTECODE; cd /; "
    f"exec python3 {SHARED}/lifecycle.py {SHARED}/old.deb {SHARED}/new.deb"
)


def main() -> int:
    """Boot, run the steps, and return the exit code."""
    if reason := why_not() or why_no_packages():
        print(f"vmtest: {reason}", file=sys.stderr)
        return 3
    with tempfile.TemporaryDirectory(prefix="pyk-vmpkg-") as name:
        share = Path(name)
        shutil.copy(built_deb(), share / "old.deb")
        shutil.copy(built_deb(NEXT_VERSION), share / "new.deb")
        shutil.copy(Path(__file__).with_name("lifecycle.py"), share)
        equipment = Equipment(memory_mb=3072, share=share, system=debian_image())
        return run_command(["sh", "-c", _COMMAND], seconds=SECONDS, equipment=equipment)


if __name__ == "__main__":
    sys.exit(main())
