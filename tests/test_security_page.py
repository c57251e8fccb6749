"""The page on security names every vulnerability that applies, and tests that exist."""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs" / "security.md").read_text()
KNOWN = """
CVE-2017-1002101 CVE-2017-1002102 CVE-2019-11245 CVE-2019-11248 CVE-2020-8551 CVE-2020-8557 CVE-2020-8558
CVE-2020-8559 CVE-2020-8564 CVE-2021-25741 CVE-2023-2431 CVE-2024-10220 CVE-2025-1767 CVE-2025-0426
"""
TESTS = sorted(set(re.findall(r"`(tests/[^`]*?\.py::[^`]*)`", PAGE)))


@pytest.mark.parametrize("cve", KNOWN.split())
def test_every_vulnerability_has_a_row_and_a_state(cve: str) -> None:
    rows = [line for line in PAGE.splitlines() if line.startswith("|") and cve in line.split("|")[1]]
    assert len(rows) == 1
    state = rows[0].split("|")[3].strip()
    assert state in ("safe", "refused", "elsewhere", "open")
    assert state == "open" or "`tests/" in rows[0]


@pytest.mark.parametrize("name", TESTS)
def test_every_test_that_is_named_exists(name: str) -> None:
    file, *parts = name.split("::")
    body = ast.parse((ROOT / file).read_text()).body
    for part in parts:
        kinds = (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
        found = [node for node in body if isinstance(node, kinds) and node.name == part]
        assert found, f"{part} is not in {file}"
        body = found[0].body
