"""What can go wrong with a pod's volumes."""

from __future__ import annotations

from collections.abc import Sequence


class VolumeError(Exception):
    """Volumes could not be mounted or unmounted; the text is for the pod's events.

    `problems` has one text per volume, each worth an event of its own.
    """

    def __init__(self, *problems: str) -> None:
        super().__init__("; ".join(problems))
        self.problems: Sequence[str] = problems


class KindError(Exception):
    """A kind's reason why it cannot give a volume; the text is for the pod's author."""


def set_up_failed(volume: str, reason: object) -> str:
    """Say that a volume cannot be had, in the words that are searched for in events."""
    return f'MountVolume.SetUp failed for volume "{volume}" : {reason}'


def joined(reasons: Sequence[str]) -> str:
    """Make one reason of several, each said once: `a`, or `[a, b]`."""
    different = list(dict.fromkeys(reasons))
    return different[0] if len(different) == 1 else f"[{', '.join(different)}]"


def told(err: OSError) -> str:
    """Give the system's reason in one line, with the path it is about."""
    reason = err.strerror or str(err)
    return f"{err.filename}: {reason}" if err.filename else reason
