"""Plugins put together: the folders that plugins expect, and what happens where there can be none."""

import asyncio
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry

from pykubelet.agent import volumes as plugins
from pykubelet.util.tasks import TaskScope


async def test_start_plugins_creates_and_labels_directories(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shared: list[Path] = []
    monkeypatch.setattr(plugins, "label_for_containers", shared.append)
    async with TaskScope() as tasks:
        plugins.start_plugins(tmp_path, CollectorRegistry(), tasks)
        assert (tmp_path / "plugins").is_dir()
        assert (tmp_path / "plugins_registry").is_dir()
    assert shared == [tmp_path / "plugins_registry", tmp_path / "plugins"]


async def test_start_plugins_directory_creation_fails_continues(tmp_path: Path) -> None:
    (tmp_path / "plugins").write_text("in the way")
    async with TaskScope() as tasks:
        plugins.start_plugins(tmp_path, CollectorRegistry(), tasks)
        await asyncio.sleep(0)
        assert (tmp_path / "plugins_registry").is_dir()
