"""The page on security names every vulnerability that applies, and tests that exist."""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "security.md").read_text()
KNOWN = """
CVE-2017-1002101 CVE-2017-1002102 CVE-2019-11245 CVE-2019-11248 CVE-2020-8551 CVE-2020-8557 CVE-2020-8558
CVE-2020-8559 CVE-2020-8564 CVE-2021-25741 CVE-2023-2431 CVE-2024-10220 CVE-2025-1767 CVE-2025-0426
"""
TESTS = sorted(set(re.findall(r"`(tests/[^`]*?\.py::[^`]*)`", PAGE)))


STATES = ("safe", "refused", "elsewhere", "accepted", "open")


def rows(heading: str) -> list[list[str]]:
    """The cells of the table below a heading, without its own two lines."""
    _, _, rest = PAGE.partition(f"## {heading}\n")
    table = [line for line in rest.partition("\n## ")[0].splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in table[2:]]


NUMBERED = rows("Published vulnerabilities of kubelets on Linux")
UNNUMBERED = rows("Without a number, but tried")


@pytest.mark.parametrize("cve", KNOWN.split())
def test_security_page_each_known_cve_has_one_row(cve: str) -> None:
    assert len([row for row in NUMBERED if cve in row[0].split(", ")]) == 1


@pytest.mark.parametrize("row", [*NUMBERED, *UNNUMBERED], ids=lambda row: row[0][:40])
def test_security_page_each_row_has_state_and_test(row: list[str]) -> None:
    assert len(row) == (4 if row in NUMBERED else 3)
    state, how = row[-2:]
    assert state in STATES
    assert "`tests/" in how
    assert state != "open" or re.search(r"\bissue \d+\b", how), "an open row names the issue that closes it"


@pytest.mark.parametrize("name", TESTS)
def test_security_page_named_tests_exist(name: str) -> None:
    file, *parts = name.split("::")
    body = ast.parse((ROOT / file).read_text()).body
    for part in parts:
        kinds = (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
        found = [node for node in body if isinstance(node, kinds) and node.name == part]
        assert found, f"{part} is not in {file}"
        body = found[0].body
