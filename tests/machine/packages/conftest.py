"""Packages are built and installed for real; without the programs for that, these tests are skipped."""

import pytest

from tests.support.packages import why_no_packages


@pytest.fixture(scope="session", autouse=True)
def package_tools() -> None:
    """Skip the tests where packages cannot be built."""
    if reason := why_no_packages():
        pytest.skip(reason)
