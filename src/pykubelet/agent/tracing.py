"""Builds and starts tracing, as the field `tracing` of the configuration has it."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator

from pykubelet import __version__
from pykubelet.agent.host_setup import StartupError
from pykubelet.config.types import KubeletConfiguration
from pykubelet.logs import get_logger
from pykubelet.tracing.span import Tracer
from pykubelet.util.tasks import TaskScope

log = get_logger(__name__)
FLUSH_SECONDS = 3.0
"""Seconds that a stopping kubelet waits for the collector."""
_MILLION = 1_000_000


@contextlib.asynccontextmanager
async def tracing(config: KubeletConfiguration, node_name: str) -> AsyncIterator[Tracer | None]:
    """Yield the kubelet's tracer, None when tracing is off, and export what it records.

    Without `samplingRatePerMillion` only spans whose parent is sampled are recorded. Raises StartupError for
    an endpoint that cannot be used.
    """
    if config.tracing is None:
        yield None
        return
    # Imported only when it is used: its messages and connections take memory.
    from pykubelet.tracing.exporter import SpanExporter
    from pykubelet.tracing.otlp import CollectorAddress

    try:
        address = CollectorAddress.parse(config.tracing.endpoint)
    except ValueError as err:
        raise StartupError(f"tracing.endpoint {err}") from None
    rate = config.tracing.sampling_rate_per_million or 0
    exporter = SpanExporter(address, {"service.name": "kubelet", "host.name": node_name}, __version__)
    log.info("Tracing", endpoint=str(address), samplingRatePerMillion=rate)
    try:
        async with TaskScope() as tasks:
            tasks.start(exporter.run(), name="traces")
            yield Tracer(exporter, rate / _MILLION)
    finally:
        await exporter.flush(FLUSH_SECONDS)
