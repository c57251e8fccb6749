"""An API server that reviews tokens and wishes as a test tells it to."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest
from prometheus_client import CollectorRegistry

from pykubelet.api.reviews import SubjectAccessReview, TokenReview, UserInfo
from pykubelet.apiserver.client import ApiClient
from pykubelet.apiserver.errors import KubeError
from pykubelet.server.metrics.server_metrics import ServerMetrics
from pykubelet.util.tasks import TaskScope

# The caches.


@pytest.fixture
async def scope() -> AsyncIterator[TaskScope]:
    async with TaskScope() as scope:
        yield scope


# Reviews.


class Api(ApiClient):
    """A client of an API server that answers as told, after a second."""

    def __init__(self, **status: Any) -> None:
        self.status = status
        self.errors: list[KubeError] = []
        self.asked: list[Any] = []

    async def create(self, resource: Any, obj: Any, namespace: str = "") -> Any:
        self.asked.append(obj)
        await asyncio.sleep(1)
        if self.errors:
            raise self.errors.pop(0)
        if isinstance(obj, TokenReview):
            return TokenReview(spec=obj.spec, status=type(obj.status)(**self.status))
        return SubjectAccessReview(spec=obj.spec, status=type(obj.status)(**self.status))


def metrics() -> ServerMetrics:
    return ServerMetrics(CollectorRegistry())


def user_info(name: str) -> Any:
    return UserInfo(username=name, uid="1", groups=["g"], extra={"k": ["v"]})
