"""Version and date of a release, and its sdist and wheel.

The wheel is always built from the sdist, so that what is missing in the sdist is found here. Both are built
by `uv build`, in an environment with the pinned build requirements of pyproject.toml.
"""

from __future__ import annotations

import os
import re
import subprocess
import tarfile
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

CHECKOUT = Path(__file__).resolve().parents[1]
_VERSION_FILE = "src/pykubelet/__init__.py"
_VERSION = re.compile(r'^__version__ = "([^"]+)"$', re.MULTILINE)
_VALID_VERSION = re.compile(r"[0-9]+(\.[0-9]+)*((a|b|rc)[0-9]+)?(\.post[0-9]+)?")


class BuildError(Exception):
    """Raised when a package cannot be built, with the reason and the remedy."""


@dataclass(frozen=True, slots=True)
class Release:
    """What is released: sources, version and date."""

    version: str
    """Version in Python's notation."""
    epoch: int
    """Time of all files in the products, in seconds since 1970."""
    checkout: Path = CHECKOUT

    @property
    def uv(self) -> Path:
        """Executable of uv, which scripts/setup installs."""
        return self.checkout / ".tools/bin/uv"

    def date(self, form: str) -> str:
        """Return the date in UTC, formatted as by strftime."""
        return time.strftime(form, time.gmtime(self.epoch))

    def environment(self) -> dict[str, str]:
        """Return the environment of the programs that build."""
        fixed = {
            "SOURCE_DATE_EPOCH": str(self.epoch),
            "PYTHONHASHSEED": "0",
            "LC_ALL": "C.UTF-8",
            "TZ": "UTC",
        }
        dropped = {"PYTHONPATH", "PYTHONDONTWRITEBYTECODE", "VIRTUAL_ENV"}
        return {name: value for name, value in os.environ.items() if name not in dropped} | fixed

    def run(
        self, *command: str | Path, cwd: Path | None = None, extra: Mapping[str, str] | None = None
    ) -> str:
        """Run a program of the build and return its output. Raises BuildError with the end of its errors."""
        return run(command, cwd or self.checkout, {**self.environment(), **(extra or {})})


def run(command: Sequence[str | Path], cwd: Path, environment: Mapping[str, str]) -> str:
    """Run a program and return its output. Raises BuildError with the end of its errors."""
    name = Path(command[0]).name
    try:
        done = subprocess.run(
            [str(part) for part in command],
            cwd=cwd,
            env=dict(environment),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
        )
    except FileNotFoundError:
        raise BuildError(f"{name} is not installed: run scripts/setup --package") from None
    if done.returncode != 0:
        tail = "\n".join((done.stderr or done.stdout).splitlines()[-15:])
        raise BuildError(f"{name} failed with exit code {done.returncode}:\n{tail}")
    return done.stdout


def find_release(version: str | None = None, checkout: Path = CHECKOUT) -> Release:
    """Return the release of a checkout; `version` replaces the one in its sources.

    Raises BuildError for an invalid version or date.
    """
    if version is None:
        found = _VERSION.search((checkout / _VERSION_FILE).read_text())
        if found is None:
            raise BuildError(f"{_VERSION_FILE} has no __version__")
        version = found[1]
    if _VALID_VERSION.fullmatch(version) is None:
        raise BuildError(f"version {version!r} is not valid: use numbers such as 1.2.3 or 1.2.3rc1")
    return Release(version, _epoch(checkout), checkout)


def _epoch(checkout: Path) -> int:
    text = os.environ.get("SOURCE_DATE_EPOCH")
    if text is None and (checkout / ".git").exists():
        text = run(["git", "log", "-1", "--format=%ct"], checkout, os.environ).strip()
    if text is None:
        # An unpacked sdist has one date for all files.
        text = str(int((checkout / "pyproject.toml").stat().st_mtime))
    if not text.isdecimal():
        raise BuildError(f"SOURCE_DATE_EPOCH is {text!r}: it must be a number of seconds since 1970")
    return int(text)


def build_wheel(release: Release, out: Path) -> tuple[Path, Path]:
    """Build the sdist and from it the wheel; return the paths of wheel and sdist. Raises BuildError."""
    out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="pyk-wheel-") as name:
        temporary = Path(name)
        release.run(release.uv, "build", "--sdist", "--out-dir", temporary / "sdist", release.checkout)
        (sdist,) = (temporary / "sdist").glob("*.tar.gz")
        source = _unpack(sdist, temporary / "source")
        if _set_version(source / _VERSION_FILE, release.version):
            release.run(release.uv, "build", "--sdist", "--out-dir", temporary / "changed", source)
            (sdist,) = (temporary / "changed").glob("*.tar.gz")
        release.run(release.uv, "build", "--wheel", "--out-dir", temporary / "wheel", source)
        (wheel,) = (temporary / "wheel").glob("*.whl")
        return _publish(wheel, out), _publish(sdist, out)


def _unpack(sdist: Path, directory: Path) -> Path:
    with tarfile.open(sdist) as archive:
        archive.extractall(directory, filter="data")
    (source,) = directory.iterdir()
    return source


def _set_version(path: Path, version: str) -> bool:
    """Write a version into the sources; return whether it differs from theirs."""
    before = path.read_text()
    after = _VERSION.sub(f'__version__ = "{version}"', before)
    path.write_text(after)
    return before != after


def _publish(product: Path, out: Path) -> Path:
    """Copy a complete product into the output directory under its final name."""
    target = out / product.name
    partial = target.with_name(f".{target.name}.partial")
    partial.write_bytes(product.read_bytes())
    partial.replace(target)
    return target
