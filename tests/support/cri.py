from __future__ import annotations

import logging
import tempfile
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry

from pykubelet.api.duration import Duration
from pykubelet.cri.channel import CriMetrics
from pykubelet.cri.connect import RuntimeConnection, connect
from tests.support.cri_servers import Runtime


class Catch(logging.Handler):
    """Keeps what is logged."""

    def __init__(self) -> None:
        super().__init__()
        self.records: list[logging.LogRecord] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.records.append(record)


@pytest.fixture
def folder() -> Iterator[Path]:
    """A directory with a path short enough for sockets, whatever the test is called."""
    with tempfile.TemporaryDirectory(prefix="cri-") as name:
        yield Path(name)


@pytest.fixture
def registry() -> CollectorRegistry:
    return CollectorRegistry()


@pytest.fixture
def metrics(registry: CollectorRegistry) -> CriMetrics:
    return CriMetrics(registry)


@pytest.fixture
def records() -> Iterator[list[logging.LogRecord]]:
    """Everything that the room logs, at full verbosity."""
    handler = Catch()
    logger = logging.getLogger("pykubelet.cri")
    level = logger.level
    logger.addHandler(handler)
    logger.setLevel(1)
    try:
        yield handler.records
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)


@pytest.fixture
async def scripted(folder: Path) -> AsyncIterator[Runtime]:
    """A running gRPC server with scripted responses."""
    async with Runtime(folder / "cri.sock") as server:
        yield server


@pytest.fixture
async def cri(scripted: Runtime, metrics: CriMetrics) -> AsyncIterator[RuntimeConnection]:
    """A client of `scripted`; what the handshake asked is forgotten."""
    async with await connect(
        f"unix://{scripted.path}", timeout=Duration.from_seconds(30), metrics=metrics
    ) as client:
        scripted.seen.clear()
        yield client
