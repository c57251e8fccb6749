"""Routes of the control socket for images; see `pykubelet images`.

| request | response |
|---|---|
| `GET /images` | `ImageUsages`: when each image was last used, as far as garbage collection knows |
| `GET /images/pulls` | list of `PullProgress`: the pulls in progress |
| `POST /images/prune?dryRun=…` | `PruneReport`: unused images that were removed, or would be |

The structs are shared with the command line.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence

from aiohttp import web
from msgspec import Struct

from pykubelet.api.meta import to_json
from pykubelet.images.image_gc import ImageGC, ImageGCError, ImageRecord
from pykubelet.images.pull_progress import PullProgress
from pykubelet.server.pods import ErrorResponse

PRUNE_TIMEOUT_SECONDS = 590.0
"""Seconds for a removal of unused images; the command line waits ten minutes."""


class ImageUsage(Struct, rename="camel", omit_defaults=True):
    """Usage of one image; times are seconds since the epoch."""

    id: str
    first_detected: float
    """Time when this kubelet process first saw the image."""
    last_used: float | None = None
    """Time when a container last used the image, in the life of this kubelet process."""


class ImageUsages(Struct):
    """Usage of all images, as of the last check of the garbage collector, which is every five minutes."""

    items: list[ImageUsage]


class PrunedImage(Struct, rename="camel"):
    """An unused image."""

    id: str
    names: list[str]
    size: int


class PruneReport(Struct, rename="camel"):
    """Result of a removal of unused images."""

    removed: list[PrunedImage]
    freed_bytes: int
    young: int
    """Number of unused images below the minimum age, which are kept."""
    min_age: str
    failures: list[str] = []


def image_routes(gc: ImageGC, pulls: Callable[[], Sequence[PullProgress]]) -> list[web.RouteDef]:
    """Return the routes."""

    async def list_usage(_: web.Request) -> web.Response:
        offset = time.time() - asyncio.get_running_loop().time()
        return _response(ImageUsages([_usage(record, offset) for record in gc.records]))

    async def list_pulls(_: web.Request) -> web.Response:
        return _response(list(pulls()))

    async def prune(request: web.Request) -> web.Response:
        dry_run = request.query.get("dryRun", "") in ("true", "1")
        try:
            async with asyncio.timeout(PRUNE_TIMEOUT_SECONDS):
                result = await gc.prune(dry_run=dry_run)
        except ImageGCError as err:
            return _response(ErrorResponse(message=f"images cannot be removed: {err}"), 503)
        except TimeoutError:
            message = "the images cannot be removed in time: the runtime is very busy; see the node's log"
            return _response(ErrorResponse(message=message), 503)
        images = [PrunedImage(item.key.id, sorted(item.names), item.size) for item in result.removed]
        return _response(
            PruneReport(
                removed=images,
                freed_bytes=sum(image.size for image in images),
                young=result.young,
                min_age=str(gc.min_age),
                failures=list(dict.fromkeys(result.failures)),
            )
        )

    return [
        web.get("/images", list_usage),
        web.get("/images/pulls", list_pulls),
        web.post("/images/prune", prune),
    ]


def _usage(record: ImageRecord, offset: float) -> ImageUsage:
    used = record.last_used
    return ImageUsage(
        record.key.id, record.first_detected + offset, used + offset if used is not None else None
    )


def _response(document: object, status: int = 200) -> web.Response:
    return web.Response(body=to_json(document), status=status, content_type="application/json")
