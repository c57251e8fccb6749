"""Tracing as the configuration has it."""

import pytest

from pykubelet.agent.host_setup import StartupError
from pykubelet.agent.tracing import tracing
from pykubelet.config.types import KubeletConfiguration, Tracing


async def test_tracing_not_configured_has_no_tracer() -> None:
    async with tracing(KubeletConfiguration(), "node") as tracer:
        assert tracer is None


@pytest.mark.parametrize("endpoint", ["dns://", "unix://host/socket"])
async def test_tracing_endpoint_without_address_raises_startup_error(endpoint: str) -> None:
    config = KubeletConfiguration(tracing=Tracing(endpoint=endpoint))
    with pytest.raises(StartupError, match=r"names no .*; write"):
        async with tracing(config, "node"):
            pass
