"""Errors of mounting and unmounting volumes, and their texts in events."""

from __future__ import annotations

from collections.abc import Sequence


class VolumeError(Exception):
    """Raised when volumes cannot be mounted or unmounted; the text is for the pod's events.

    `problems` has one text per event; `retry_after` is the delay in seconds after which a retry can succeed,
    None if unknown; `rejection_reason` is the reason for rejecting the pod permanently, empty if it is to be
    retried.
    """

    def __init__(self, *problems: str, retry_after: float | None = None, rejection_reason: str = "") -> None:
        super().__init__("; ".join(problems))
        self.problems: Sequence[str] = problems
        self.retry_after = retry_after
        self.rejection_reason = rejection_reason


class VolumePluginError(Exception):
    """Raised when a volume plugin cannot provide a volume; the text is for the pod's author."""

    action = "MountVolume.SetUp failed"
    """Operation that failed, in the wording of upstream's events."""


class VolumeNotReady(VolumePluginError):
    """Raised while a prerequisite is missing; its raiser has the pod's worker woken when it is met."""


class NotAttached(VolumeNotReady):
    """Raised while a volume is not attached to this node; the pod is woken when it is."""

    action = "MountVolume.WaitForAttach failed"


class VolumeLimitExceeded(VolumePluginError):
    """Raised when the driver's volume limit on this node is reached; if it persists, the pod is rejected."""

    action = "MountVolume.WaitForAttach failed"


class BadSource(VolumePluginError):
    """Raised when a volume source is invalid, so that nothing can be mounted."""

    action = "MountVolume.NewMounter initialization failed"


class BadOptions(VolumePluginError):
    """Raised for mount options on a volume type that does not support them."""

    action = "MountVolume.MountOptionSupport check failed"


_BLOCK_ACTIONS = {
    VolumePluginError.action: "MapVolume.SetUpDevice failed",
    BadSource.action: "MapVolume.NewBlockVolumeMapper initialization failed",
}


def set_up_failure_text(
    volume: str, reason: object, action: str = VolumePluginError.action, *, block: bool = False
) -> str:
    """Return the event text for a volume that cannot be set up, in upstream's wording.

    Volumes used as devices (`block`) are mapped, not mounted.
    """
    if block:
        action = _BLOCK_ACTIONS.get(action, action.replace("MountVolume.", "MapVolume."))
    return f'{action} for volume "{volume}" : {reason}'


def failure_event(problem: str) -> str:
    """Return the event reason for an entry of `VolumeError.problems`."""
    if problem.startswith("AttachVolume."):
        return "FailedAttachVolume"
    mapping = problem.startswith("MapVolume.") and not problem.startswith("MapVolume.NodeAffinity")
    return "FailedMapVolume" if mapping else "FailedMount"


def join_reasons(reasons: Sequence[str]) -> str:
    """Join the distinct reasons: `a`, or `[a, b]`."""
    distinct = list(dict.fromkeys(reasons))
    return distinct[0] if len(distinct) == 1 else f"[{', '.join(distinct)}]"


def format_os_error(err: OSError) -> str:
    """Return the reason of an OSError in one line, with its path."""
    reason = err.strerror or str(err)
    return f"{err.filename}: {reason}" if err.filename else reason
