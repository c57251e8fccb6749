"""Root file system of a small Debian, for the image and for the tests of the packages."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from release.sources import Release

MIRROR = "http://deb.debian.org/debian"


def bootstrap(
    release: Release,
    root: Path,
    packages: Sequence[str],
    *,
    suite: str = "bookworm",
    keep_lists: bool = False,
) -> None:
    """Install Debian's essential packages, apt and these packages into a new directory. Raises BuildError.

    `keep_lists` leaves apt's package lists there, with which it can resolve dependencies later.
    """
    cleanup = ["--skip=cleanup/apt/lists"] if keep_lists else []
    command = ["mmdebstrap", "--quiet", "--mode=root", "--variant=apt", "--format=directory"]
    include = [f"--include={','.join(packages)}"] if packages else []
    options = ['--aptopt=APT::Install-Recommends "false"']
    release.run(*command, *options, *cleanup, *include, suite, root, MIRROR)
