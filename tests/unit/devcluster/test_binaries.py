"""Builds of Go modules into the cache, with a stand-in for the compiler."""

import textwrap
from pathlib import Path

import pytest

from pykubelet.devcluster.binaries import GoBuild, GoModule, ensure_built, module_cache_dir
from pykubelet.devcluster.layout import NotAvailable


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> GoModule:
    """A module whose compiler writes its output, or fails if there is a file `broken`."""
    directory = tmp_path / "module"
    directory.mkdir()
    (directory / "go.mod").write_text("module m\nrequire example.org/m v1.2.3\n")
    (directory / "go.sum").touch()
    go = tmp_path / "bin/go"
    go.parent.mkdir()
    go.write_text(
        textwrap.dedent("""\
            #!/bin/sh
            while [ "$1" != -o ]; do shift; done
            echo partial > "$2"
            test ! -e broken || { echo "no such package" >&2; exit 1; }
            """)
    )
    go.chmod(0o755)
    monkeypatch.setenv("PATH", f"{go.parent}:/usr/bin:/bin")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return GoModule(
        directory=directory,
        name="m",
        title="the module",
        remedy="",
        programs={"program": GoBuild(links=("link",))},
        source="example.org/m",
    )


def names(cache_dir: Path) -> set[str]:
    return {path.name.removeprefix(cache_dir.name) for path in cache_dir.parent.iterdir()}


def test_ensure_built_module_without_build_stored_once(module: GoModule) -> None:
    reports: list[str] = []
    cache_dir = ensure_built(module, reports.append)
    assert (cache_dir / "link").read_text() == "partial\n"
    assert len(reports) == 2
    assert ensure_built(module, reports.append) == cache_dir
    assert len(reports) == 2
    assert names(cache_dir) == {"", ".lock"}


def test_ensure_built_after_killed_build_leaves_nothing_of_it(module: GoModule) -> None:
    cache_dir = module_cache_dir(module.directory, module.name)
    left = cache_dir.with_name(f"{cache_dir.name}.partial")
    left.mkdir(parents=True)
    (left / "other").touch()
    assert ensure_built(module, lambda text: None) == cache_dir
    assert {path.name for path in cache_dir.iterdir()} == {"program", "link"}
    assert names(cache_dir) == {"", ".lock"}


def test_ensure_built_compiler_fails_leaves_nothing(module: GoModule) -> None:
    (module.directory / "broken").touch()
    with pytest.raises(NotAvailable, match=r"the module could not be built: no such package"):
        ensure_built(module, lambda text: None)
    assert names(module_cache_dir(module.directory, module.name)) == {".lock"}
