"""These tests run in the control plane's guest of `make kubeadm`; elsewhere they are skipped."""

import os
from pathlib import Path

import pytest

from tests.kubeadm.settings import ROLE


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if ROLE not in os.environ:
        for item in items:
            if Path(__file__).parent in item.path.parents:
                item.add_marker(pytest.mark.skip(reason="runs in a virtual machine: make kubeadm"))
