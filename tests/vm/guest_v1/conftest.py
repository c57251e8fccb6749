"""Elsewhere than in the virtual machine with cgroups of v1 these tests are skipped."""

import os
from pathlib import Path

import pytest

from tests.vm.machine import MARKER


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if os.environ.get(MARKER) != "v1":
        for item in items:
            if Path(__file__).parent in item.path.parents:
                item.add_marker(pytest.mark.skip(reason="runs in a virtual machine: make vmtest"))
