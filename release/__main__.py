"""`python -m release deb | wheel | image`: builds a package and prints its path."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from release.deb import build_deb
from release.sources import CHECKOUT, BuildError, build_wheel, find_release


def main() -> int:
    """Build what the arguments name; return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m release", description="Build a package of pykubelet.")
    parser.add_argument("product", choices=["deb", "wheel", "image"])
    parser.add_argument("--out", type=Path, default=CHECKOUT / "dist", help="directory of the products")
    parser.add_argument("--version", help="version to release instead of the one in the sources")
    arguments = parser.parse_args()
    try:
        release = find_release(arguments.version)
        if arguments.product == "deb":
            products = [build_deb(release, arguments.out)]
        elif arguments.product == "wheel":
            products = [*build_wheel(release, arguments.out)]
        else:
            from release.image import build_image

            products = [build_image(release, arguments.out)]
    except (BuildError, OSError) as err:
        print(f"release: {err}", file=sys.stderr)
        return 1
    for product in products:
        print(f"{product} ({product.stat().st_size / 1e6:.1f} MB)")
    return 0


if __name__ == "__main__":
    sys.exit(main())
