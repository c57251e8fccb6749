"""Bounds of `make bench` for container logs."""

import re
from pathlib import Path

from bench.logs import _CHECK_SECONDS, _FIRST_CHECK_SECONDS, RATE_MB

PAGE = (Path(__file__).parents[2] / "docs" / "logs.md").read_text()


def test_growth_until_check_is_that_of_documentation() -> None:
    found = re.search(
        r"a log of (\d+) MB/s to\s(\d+) MB of growth until a check, "
        r"and once, until the first one, to (\d+) MB",
        PAGE,
    )
    assert found is not None
    rate, growth, first = map(int, found.groups())
    assert (rate, growth, first) == (RATE_MB, _CHECK_SECONDS * RATE_MB, _FIRST_CHECK_SECONDS * RATE_MB)
