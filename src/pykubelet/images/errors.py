"""Why a container waits for its image, as `status.containerStatuses[].state.waiting` tells it."""

from __future__ import annotations

from typing import Literal

ImageReason = Literal[
    "ErrImagePull",
    "ImagePullBackOff",
    "ErrImageNeverPull",
    "InvalidImageName",
    "ImageInspectError",
    "RegistryUnavailable",
    "SignatureValidationFailed",
]


class ImageError(Exception):
    """The image cannot be had now; the events about it are already recorded."""

    def __init__(self, reason: ImageReason, message: str, retry_after: float | None = None) -> None:
        super().__init__(reason, message)
        self.reason: ImageReason = reason
        self.message = message
        self.retry_after = retry_after
        """Seconds until another attempt can pull, where a back-off is in force."""

    def __str__(self) -> str:
        return f"{self.reason}: {self.message}"
