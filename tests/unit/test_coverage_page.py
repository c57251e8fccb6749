"""The page that compares our packages with the upstream kubelet's directories."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "coverage.md").read_text()
UPSTREAM = Path.home() / "go/pkg/mod/k8s.io/kubernetes@v1.36.3/pkg/kubelet"
ROWS = [
    [cell.strip() for cell in line.strip("|").split("|")]
    for line in PAGE.splitlines()
    if line.startswith("| ")
]
COVERED = [row for row in ROWS if len(row) in (3, 4) and row[0] not in ("pkg/kubelet", "subject")]

ABSENT = ("in progress", "missing")
"""Marks of rows without a path."""


def names(cell: str) -> list[str]:
    return re.findall(r"`([^`]+)`", cell)


@pytest.mark.parametrize("row", COVERED, ids=lambda row: row[0].replace("`", ""))
def test_coverage_page_row_names_existing_paths(row: list[str]) -> None:
    ours, tests = names(row[-2]), names(row[-1])
    assert all((ROOT / "src/pykubelet" / path).exists() for path in ours), ours
    assert all((ROOT / "tests" / path).exists() for path in tests), tests
    assert ours or row[-2] in ABSENT
    assert tests or row[-1] in ABSENT


def test_coverage_page_lists_each_directory_once() -> None:
    listed = [name for row in ROWS for name in names(row[0])]
    assert len(listed) == len(set(listed))
    assert len(COVERED) > 110


@pytest.mark.skipif(not UPSTREAM.is_dir(), reason="the upstream source is not on this host")
def test_coverage_page_lists_all_upstream_directories() -> None:
    listed = {name for row in ROWS if row[0] != "pkg/kubelet" for name in names(row[0])}
    directories = {
        str(path.parent.relative_to(UPSTREAM))
        for path in UPSTREAM.rglob("*.go")
        if not path.name.endswith("_test.go") and "testdata" not in path.parts
    } - {"."}
    assert directories - listed == set()
    assert {name for name in listed if not (UPSTREAM / name).exists() and "pkg/" not in name} == set()
