"""What can go wrong with a pod's volumes."""

from __future__ import annotations


class VolumeError(Exception):
    """A volume could not be mounted or unmounted; the text is for the pod's event."""


def set_up_failed(volume: str, reason: object) -> VolumeError:
    """Say that a volume cannot be had, in the words that are searched for in events."""
    return VolumeError(f'MountVolume.SetUp failed for volume "{volume}" : {reason}')


def told(err: OSError) -> str:
    """Give the system's reason in one line, with the path it is about."""
    reason = err.strerror or str(err)
    return f"{err.filename}: {reason}" if err.filename else reason
