"""Answers that no runtime should give: each check says what is missing, or nothing.

The agent decides from these answers what to start and what to kill, so an answer without a name or
an id is refused where it arrives instead of being misread later.
"""

from pykubelet.cri import runtime_pb2 as pb


def version(answer: pb.VersionResponse) -> str:
    """All four fields are required."""
    fields = ("version", "runtime_name", "runtime_version", "runtime_api_version")
    return _missing({field: getattr(answer, field) for field in fields})


def status(answer: pb.StatusResponse) -> str:
    """RuntimeReady and NetworkReady are both required."""
    if len(answer.status.conditions) < 2:
        return "the RuntimeReady or the NetworkReady condition is not set"
    return ""


def sandbox_status(answer: pb.PodSandboxStatusResponse) -> str:
    """A sandbox must say which pod it belongs to."""
    if not answer.HasField("status"):
        return ""
    it = answer.status
    return _missing(
        {
            "status.id": it.id,
            "status.metadata.name": it.metadata.name,
            "status.metadata.namespace": it.metadata.namespace,
            "status.metadata.uid": it.metadata.uid,
            "status.created_at": it.created_at,
        }
    )


def container_status(answer: pb.ContainerStatusResponse) -> str:
    """A container must say its name and its image."""
    if not answer.HasField("status"):
        return ""
    it = answer.status
    return _missing(
        {
            "status.id": it.id,
            "status.metadata.name": it.metadata.name,
            "status.created_at": it.created_at,
            "status.image.image": it.image.image,
            "status.image_ref": it.image_ref,
        }
    )


def image_status(answer: pb.ImageStatusResponse) -> str:
    """No image at all is a valid answer; half an image is not."""
    if not answer.HasField("image"):
        return ""
    return _missing({"image.id": answer.image.id, "image.size": answer.image.size})


def sandbox_id(answer: pb.RunPodSandboxResponse) -> str:
    """A sandbox that was made has an id."""
    return _missing({"pod_sandbox_id": answer.pod_sandbox_id})


def container_id(answer: pb.CreateContainerResponse) -> str:
    """A container that was made has an id."""
    return _missing({"container_id": answer.container_id})


def image_ref(answer: pb.PullImageResponse) -> str:
    """An image that was pulled has a reference."""
    return _missing({"image_ref": answer.image_ref})


def url(answer: pb.ExecResponse | pb.AttachResponse | pb.PortForwardResponse) -> str:
    """A stream that was prepared has an address."""
    return _missing({"url": answer.url})


def _missing(fields: dict[str, str | int]) -> str:
    names = [name for name, value in fields.items() if not value]
    return f"not set: {', '.join(names)}" if names else ""
