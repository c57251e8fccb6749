"""The image service. Every call ends within the request timeout but a pull, which has no deadline.

All methods raise CriError.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator

from pykubelet.cri import checks
from pykubelet.cri import runtime_pb2 as pb
from pykubelet.cri.channel import FOREVER
from pykubelet.cri.service import IMAGE_SERVICE, Service, flatten


class ImageClient(Service):
    """Images of one runtime."""

    path = IMAGE_SERVICE

    async def list_images(self, filter: pb.ImageFilter | None = None) -> list[pb.Image]:
        """List images, all of them without a filter."""
        if self._streaming:
            with self._fall_back():
                return [item async for item in self.stream_images(filter)]
        request = pb.ListImagesRequest(filter=filter)
        return list((await self._call("ListImages", "list_images", request, pb.ListImagesResponse)).images)

    def stream_images(self, filter: pb.ImageFilter | None = None) -> AsyncGenerator[pb.Image, None]:
        """List images one by one, which has no limit of size."""
        request = pb.StreamImagesRequest(filter=filter)
        parts = self._stream("StreamImages", "list_images", request, pb.StreamImagesResponse)
        return flatten(parts, lambda part: part.images)

    async def image_status(self, image: pb.ImageSpec, *, verbose: bool = False) -> pb.ImageStatusResponse:
        """Ask for an image; the answer's `image` is not set when the runtime does not have it."""
        request = pb.ImageStatusRequest(image=image, verbose=verbose)
        return await self._call(
            "ImageStatus", "image_status", request, pb.ImageStatusResponse, check=checks.image_status
        )

    async def pull_image(
        self,
        image: pb.ImageSpec,
        auth: pb.AuthConfig | None = None,
        sandbox_config: pb.PodSandboxConfig | None = None,
    ) -> str:
        """Pull an image, however long it takes, and return the runtime's reference to it."""
        answer = await self._call(
            "PullImage",
            "pull_image",
            pb.PullImageRequest(image=image, auth=auth, sandbox_config=sandbox_config),
            pb.PullImageResponse,
            timeout=FOREVER,
            check=checks.image_ref,
        )
        return answer.image_ref

    async def remove_image(self, image: pb.ImageSpec) -> None:
        """Remove an image; removing twice is fine."""
        request = pb.RemoveImageRequest(image=image)
        await self._call("RemoveImage", "remove_image", request, pb.RemoveImageResponse)

    async def image_fs_info(self) -> pb.ImageFsInfoResponse:
        """Ask which file systems hold images and containers, and how full they are."""
        return await self._call(
            "ImageFsInfo", "image_fs_info", pb.ImageFsInfoRequest(), pb.ImageFsInfoResponse
        )
