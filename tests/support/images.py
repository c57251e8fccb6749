from collections.abc import AsyncIterator

import pytest
from prometheus_client import CollectorRegistry

from pykubelet.images.metrics import ImageMetrics
from pykubelet.podconfig.pod_history import PodHistory
from pykubelet.util.tasks import TaskScope
from tests.support.image_service import FakeImages


@pytest.fixture
def registry() -> CollectorRegistry:
    return CollectorRegistry()


@pytest.fixture
def metrics(registry: CollectorRegistry) -> ImageMetrics:
    return ImageMetrics(registry)


@pytest.fixture
def journal() -> PodHistory:
    return PodHistory()


@pytest.fixture
async def scope() -> AsyncIterator[TaskScope]:
    async with TaskScope() as tasks:
        yield tasks


@pytest.fixture
def service() -> FakeImages:
    return FakeImages()
