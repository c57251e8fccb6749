"""Stage of the resource claims (DRA): prepared before the sandbox, unprepared before the final status."""

from __future__ import annotations

from collections.abc import Callable
from typing import ClassVar

from pykubelet.api.pod import Pod
from pykubelet.cm.dra.claims import ClaimError
from pykubelet.logs import get_logger
from pykubelet.podconfig.pod_history import PodHistory
from pykubelet.podsync.contract import SyncError
from pykubelet.podsync.resource_allocator import PodClaims, has_claims
from pykubelet.podsync.stages.base import PodStart, Stage
from pykubelet.podsync.stages.volumes import MOUNT_SECONDS

log = get_logger(__name__)


class ClaimStage(Stage):
    """Resource claims of a pod."""

    name = "claims"

    before_final_status: ClassVar[bool] = True

    def __init__(self, claims: PodClaims, history: PodHistory, is_removed: Callable[[str], bool]) -> None:
        """Initialize; `is_removed` returns whether no source has the pod any more."""
        self._claims = claims
        self._history = history
        self._is_removed = is_removed

    async def prepare(self, start: PodStart) -> None:
        """Prepare all claims for a new sandbox."""
        if not start.actions.create_sandbox:
            return
        work = self._claims.prepare(start.pod)
        try:
            # A driver may be slow; without claims there is nothing to wait for.
            await (start.slot.while_away(work, after=MOUNT_SECONDS) if has_claims(start.pod) else work)
        except ClaimError as err:
            message = f"Failed to prepare dynamic resources: {err}"
            self._history.event(start.pod, "Warning", "FailedPrepareDynamicResources", message)
            self._history.note(start.pod.uid, "claims", str(err))
            raise SyncError(str(err)) from err

    async def release(self, uid: str, pod: Pod | None) -> None:
        """Unprepare the claims; a pod that was deleted by force does not wait for a driver."""
        try:
            await self._claims.unprepare(uid)
        except ClaimError as err:
            self._history.note(uid, "claims", str(err))
            if not self._is_removed(uid):
                raise SyncError(str(err)) from err
            log.error(err, "Failed to unprepare claims of a removed pod, retrying later", podUID=uid)
