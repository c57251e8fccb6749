"""A pod lets go of a volume: with its driver, or without it, because a pod can always be deleted.

A driver takes back what it published, and is given time for that (`patience.py`): an ordinary restart
of a driver, or a moment of trouble, goes the ordinary way. A driver that does not come back, or only ever
fails, has the pod wait no longer:

1. what the driver is owed is written down (`debts.py`);
2. the published place is unmounted, or detached when somebody uses it or it does not answer;
3. the place is removed. What is in it, if it was no mount, is moved aside: it is not ours to delete.

The volume stays in use in the node's status, so that nobody detaches it, and what was staged for the
node stays as it is, until the driver is there again and has been asked (`paying.py`).
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path

from pykubelet.host.mounts import read_mounts, unmount
from pykubelet.logs import get_logger
from pykubelet.tasks import finish_in_thread, in_own_thread
from pykubelet.volumes.csi.debts import Debt, Debts
from pykubelet.volumes.csi.names import KIND
from pykubelet.volumes.csi.parts import DriverFailed, Parts
from pykubelet.volumes.errors import KindError, NotYet

log = get_logger(__name__)

UNMOUNT_SECONDS = 20.0
"""How long unmounting may take before the mount is detached."""
EVENT = "UnpublishedWithoutDriver"


async def let_go(
    parts: Parts, debt: Debt, ordinary: Callable[[], Awaitable[None]], clear: Callable[[], None]
) -> None:
    """Have a driver take back what it published (`ordinary`), or do without it when it had its time.

    `debt` is what it will then be owed, and `clear` removes the place and its traces, in a thread. May be
    interrupted anywhere and repeated. Raises what these raise, while the driver has time left.
    """
    try:
        await ordinary()
    except (KindError, OSError) as err:
        if not parts.patience.is_over(debt.target, absent=_is_absent(err)):
            raise
        await _without_driver(parts, debt, clear, err)
    else:
        await finish_in_thread(lambda: parts.debts.settle(debt))
    parts.patience.forget(debt.target)


async def unmount_by_force(place: Path) -> None:
    """Unmount all that is mounted at or below a real path, whatever it takes; never waits for long.

    Raises KindError.
    """
    try:
        await _unmounted(place, detach=False)
    except OSError as err:  # also for want of an answer
        log.warning("Detaching a volume that cannot be unmounted", path=place, err=str(err) or "it hangs")
        try:
            await _unmounted(place, detach=True)
        except OSError as again:
            reason = again.strerror or "it does not answer"
            raise KindError(f"{KIND}: cannot detach {place}: {reason}") from again


async def _without_driver(parts: Parts, debt: Debt, clear: Callable[[], None], why: Exception) -> None:
    await finish_in_thread(lambda: parts.debts.note(debt))
    place = Path(debt.target)
    await unmount_by_force(place)

    def remove() -> None:
        # Looked up anew: a driver that hangs for long may go on at any time.
        if read_mounts(place):
            raise KindError(f"{KIND}: {place} is mounted again")
        _put_aside(parts.debts, debt)
        clear()

    await finish_in_thread(remove)
    log.warning(
        "Let go of a volume without its CSI driver, which is asked when it is there again",
        driver=debt.driver,
        volume=debt.handle,
        podUID=debt.pod,
        err=why,
    )
    parts.tell(
        debt.pod,
        EVENT,
        f'CSI driver "{debt.driver}" did not take back volume "{debt.volume}" ({debt.handle}), so it was '
        f"unmounted without the driver: {why}. The volume stays in use on this node until the driver is "
        "there and has been asked",
    )
    parts.owes()


def _put_aside(debts: Debts, debt: Debt) -> None:
    """Move a plain directory with something in it out of the way: deleting it might delete a volume."""
    place = Path(debt.target)
    if place.is_symlink() or not place.is_dir() or not any(place.iterdir()):
        return
    aside = debts.aside(debt)
    place.rename(aside)
    log.warning(
        "A CSI driver had put files where a mount should have been; they are kept aside",
        driver=debt.driver,
        volume=debt.handle,
        path=aside,
    )


async def _unmounted(place: Path, *, detach: bool) -> None:
    def work() -> None:
        # The youngest first: whatever stands on a mount was mounted later.
        for mounted in reversed(read_mounts(place)):
            unmount(mounted.point, detach=detach)

    async with asyncio.timeout(UNMOUNT_SECONDS):
        await in_own_thread(work, name=f"unmount {place}", patience=0)


def _is_absent(err: Exception) -> bool:
    """Whether the driver is not there; one that is there and says no may have a reason."""
    return isinstance(err, NotYet) or (isinstance(err, DriverFailed) and not err.was_reached)
