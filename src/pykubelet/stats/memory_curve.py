"""Memory of a container in the last minutes, as `pykubelet describe` shows it.

A curve has one slot per interval. Each slot has the largest sample of its time and the number of OOM kills; a
slot without a sample is 0. The curve belongs to the container's name in its pod, so that it shows what
happened before a restart. It takes about 500 bytes, whatever the container does.
"""

from __future__ import annotations

from array import array

SLOTS = 60
_LARGEST_KIB = (1 << 32) - 1
_EMPTY = array("I", bytes(4 * SLOTS))
_MOST_KILLS = 255


class MemoryCurve:
    """Ring of memory samples by slot number, which is the time divided by the length of a slot."""

    __slots__ = ("_kib", "_kills", "_slot")

    def __init__(self) -> None:
        self._kib = _EMPTY[:]
        self._kills: bytearray | None = None
        """Kills by slot; None before the first."""
        self._slot = 0
        """Latest slot."""

    def add(self, slot: int, size: int) -> None:
        """Record a sample in bytes."""
        kib = size >> 10 or 1
        if kib > _LARGEST_KIB:
            kib = _LARGEST_KIB
        if slot == self._slot + 1 and self._kills is None:
            # The usual case: the sample replaces the oldest one.
            self._kib[slot % SLOTS] = kib
            self._slot = slot
            return
        if slot != self._slot:
            self._advance(slot)
        index = slot % SLOTS
        if kib > self._kib[index]:
            self._kib[index] = kib

    def add_kill(self, slot: int) -> None:
        """Record an OOM kill."""
        if slot != self._slot:
            self._advance(slot)
        if self._kills is None:
            self._kills = bytearray(SLOTS)
        index = slot % SLOTS
        self._kills[index] = min(self._kills[index] + 1, _MOST_KILLS)

    def read(self, slot: int) -> tuple[list[int], list[int]]:
        """Return samples in bytes and kills until a slot, both from the first slot that has either.

        A single slot without a sample repeats the one before: samples are taken a little less often than
        once per slot.
        """
        if slot != self._slot:
            self._advance(slot)
        order = [index % SLOTS for index in range(slot + 1, slot + 1 + SLOTS)]
        sizes = [self._kib[index] << 10 for index in order]
        kills = [self._kills[index] if self._kills is not None else 0 for index in order]
        for at in range(1, SLOTS - 1):
            if not sizes[at] and sizes[at + 1]:
                sizes[at] = sizes[at - 1]
        first = next((at for at in range(SLOTS) if sizes[at] or kills[at]), SLOTS)
        return sizes[first:], kills[first:]

    def _advance(self, slot: int) -> None:
        """Clear the slots until a new one; all of them if the clock was set back."""
        ahead = slot - self._slot
        if not 0 < ahead < SLOTS:
            self._kib[:] = _EMPTY
            self._kills = None
        else:
            for cleared in range(self._slot + 1, slot + 1):
                self._kib[cleared % SLOTS] = 0
                if self._kills is not None:
                    self._kills[cleared % SLOTS] = 0
        self._slot = slot
