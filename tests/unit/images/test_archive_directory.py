"""The record of archives: what stays pinned after failures, without a runtime."""

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Iterable
from pathlib import Path
from typing import Any, BinaryIO

import pytest

from pykubelet.images import archive_directory
from pykubelet.images.archive import ArchiveContents
from pykubelet.images.archive_directory import RECORD_NAME, ArchiveDirectory
from pykubelet.images.pins import PinError
from tests.support.waiting import until


class Importer:
    """An importer whose archives contain names of images, one per line."""

    def __init__(self) -> None:
        self.pinned: set[str] = set()
        self.failures = 0
        """Number of the next removals of pins that fail."""

    async def check(self, file: BinaryIO) -> ArchiveContents:
        text = file.read().decode()
        return ArchiveContents(tuple(text.split()), f"digest of {text}", is_gzip=False)

    async def load(self, _: BinaryIO, contents: ArchiveContents) -> None:
        self.pinned.update(contents.names)

    async def are_present(self, names: Iterable[str]) -> bool:
        return self.pinned.issuperset(names)

    async def unpin(self, names: Iterable[str]) -> None:
        if chosen := set(names):
            if self.failures:
                self.failures -= 1
                raise PinError("the disk is full")
            self.pinned -= chosen


@contextlib.asynccontextmanager
async def importing(tmp_path: Path, importer: Any) -> AsyncIterator[None]:
    task = asyncio.ensure_future(ArchiveDirectory(tmp_path / "images", tmp_path, importer).run())
    try:
        yield
    finally:
        task.cancel()
        await asyncio.wait([task])


@pytest.mark.parametrize("change", ["removed", "replaced"])
async def test_run_unpin_fails_is_retried(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: str
) -> None:
    monkeypatch.setattr(archive_directory, "SCAN_SECONDS", 0.02)
    monkeypatch.setattr(archive_directory, "_RETRY_SECONDS", (0.02, 0.02))
    importer, file, record = Importer(), tmp_path / "images" / "a.tar", tmp_path / RECORD_NAME
    file.parent.mkdir()
    file.write_text("old both")
    async with importing(tmp_path, importer):
        await until(lambda: record.exists() and "old" in record.read_text())
        importer.failures = 2
        if change == "removed":
            file.unlink()
        else:
            (tmp_path / "new").write_text("new both")
            (tmp_path / "new").rename(file)
        left = set() if change == "removed" else {"new", "both"}
        await until(lambda: importer.pinned == left)
        await until(lambda: {i for e in json.loads(record.read_text()).values() for i in e["images"]} == left)
    assert importer.failures == 0


def test_list_empty_file_is_only_unsettled_while_it_is_written(tmp_path: Path) -> None:
    importer: Any = Importer()
    directory, file = ArchiveDirectory(tmp_path / "images", tmp_path, importer), tmp_path / "images" / "a.tar"
    file.parent.mkdir()
    file.touch()
    assert directory._list(frozenset()) == archive_directory._Listing({}, unsettled=False)
    assert directory._list(frozenset({file})) == archive_directory._Listing({}, unsettled=True)
    file.write_text("x")
    assert not directory._list(frozenset()).unsettled
    assert "a.tar" in directory._list(frozenset()).stamps
