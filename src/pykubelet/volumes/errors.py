"""What can go wrong with a pod's volumes."""

from __future__ import annotations

from collections.abc import Sequence


class VolumeError(Exception):
    """Volumes could not be mounted or unmounted; the text is for the pod's events.

    `problems` has one text per volume, each worth an event of its own; `retry_after` is in how many
    seconds a new try makes sense, None when nobody knows; `refusal` is the reason by which the pod is
    refused for good, empty when it should be tried again.
    """

    def __init__(self, *problems: str, retry_after: float | None = None, refusal: str = "") -> None:
        super().__init__("; ".join(problems))
        self.problems: Sequence[str] = problems
        self.retry_after = retry_after
        self.refusal = refusal


class VolumePluginError(Exception):
    """A kind's reason why it cannot give a volume; the text is for the pod's author."""

    action = "MountVolume.SetUp failed"
    """What failed, in the words that are searched for in events."""


class VolumeNotReady(VolumePluginError):
    """Something else must happen first; whoever says so has the pod's worker woken when it has."""


class VolumeLimitExceeded(VolumePluginError):
    """No further volume of its driver fits on the node; a pod that meets this for long is refused."""

    action = "MountVolume.WaitForAttach failed"


class BadSource(VolumePluginError):
    """The source is not what it should be, so that nothing can be mounted."""

    action = "MountVolume.NewMounter initialization failed"


class BadOptions(VolumePluginError):
    """Mount options that mean nothing to this kind of volume."""

    action = "MountVolume.MountOptionSupport check failed"


_OF_DEVICES = {
    VolumePluginError.action: "MapVolume.SetUpDevice failed",
    BadSource.action: "MapVolume.NewBlockVolumeMapper initialization failed",
}


def set_up_failed(
    volume: str, reason: object, action: str = VolumePluginError.action, *, block: bool = False
) -> str:
    """Say that a volume cannot be had, in the words that are searched for in events.

    Volumes that are wanted as devices (`block`) are mapped, not mounted.
    """
    if block:
        action = _OF_DEVICES.get(action, action.replace("MountVolume.", "MapVolume."))
    return f'{action} for volume "{volume}" : {reason}'


def failure_event(problem: str) -> str:
    """Give the reason of the event that tells of a volume's problem (`VolumeError.problems`)."""
    mapping = problem.startswith("MapVolume.") and not problem.startswith("MapVolume.NodeAffinity")
    return "FailedMapVolume" if mapping else "FailedMount"


def joined(reasons: Sequence[str]) -> str:
    """Make one reason of several, each said once: `a`, or `[a, b]`."""
    different = list(dict.fromkeys(reasons))
    return different[0] if len(different) == 1 else f"[{', '.join(different)}]"


def told(err: OSError) -> str:
    """Give the system's reason in one line, with the path it is about."""
    reason = err.strerror or str(err)
    return f"{err.filename}: {reason}" if err.filename else reason
