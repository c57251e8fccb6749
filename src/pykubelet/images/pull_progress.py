"""Progress of image pulls: bytes and layers, as far as the runtime reports them."""

from __future__ import annotations

from msgspec import Struct


class PullProgress(Struct, frozen=True, rename="camel", omit_defaults=True):
    """Progress of one pull; sizes are unknown to runtimes that do not report them."""

    image: str
    """Reference of the image, as the pod requests it."""
    started: float
    """Start of the pull, in seconds since the epoch."""
    done_bytes: int | None = None
    """Bytes of the layers received so far."""
    total_bytes: int | None = None
    """Bytes of all layers that are not on the node yet."""
    done_layers: int | None = None
    total_layers: int | None = None
