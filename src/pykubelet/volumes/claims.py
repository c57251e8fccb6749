"""From a pod's claim to the volume behind it, asking the API server.

A node may get the single claims and volumes that its pods name, and nothing else: it cannot watch them.
So both are asked for anew with every try, and a pod whose claim is not bound tries again after the
worker's growing pause, as the reference does. What is wrong with a claim is decided in `claim_rules.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping

from pykubelet.api.persistent import PersistentVolume, PersistentVolumeClaim
from pykubelet.api.pod import Pod
from pykubelet.api.volume import Volume
from pykubelet.kube.client import ApiClient
from pykubelet.kube.errors import ApiError, KubeError
from pykubelet.kube.resources import CLAIMS, PERSISTENT_VOLUMES
from pykubelet.pods.second_tries import until_seen
from pykubelet.volumes.claim_rules import (
    ClaimError,
    check_affinity,
    check_claim,
    check_mode,
    check_owner,
    check_volume,
    claim_name,
    wanted_volume,
)
from pykubelet.volumes.csi.names import MIGRATED
from pykubelet.volumes.errors import KindError
from pykubelet.volumes.kind import Wanted


class ServerAway(ClaimError):
    """The API server did not say anything about the claim; what it said before still holds."""


class Claims:
    """Finds the volumes behind claims; `api` is None on a node that belongs to no cluster."""

    def __init__(
        self,
        api: ApiClient | None,
        node_name: str,
        node_labels: Callable[[], Mapping[str, str] | None],
        given: Container[str] = (),
    ) -> None:
        """Take the API server, and the node's name and labels; None for labels that are not known yet.

        `given`: the kinds that somebody gives as they are; what else has become drivers' is theirs.
        """
        self._api = api
        self._given = given
        self._node_name = node_name
        self._node_labels = node_labels

    async def wanted(self, pod: Pod, volume: Volume) -> Wanted:
        """Give the volume behind a pod's claim.

        Raises ClaimError for a claim that cannot be used (yet), and AffinityError for a volume that
        cannot be reached from this node.
        """
        name = claim_name(pod, volume)
        if self._api is None:
            raise ClaimError(
                f'volume {volume.name} needs the claim "{name}", and this node belongs to no cluster that '
                "could have one: use emptyDir or hostPath"
            )
        where = f"{pod.metadata.namespace}/{name}"
        claim = await self._claim(self._api, pod.metadata.namespace, name)
        check_claim(claim, where)
        if volume.persistent_volume_claim is None:
            check_owner(claim, pod)
        found = await self._volume(self._api, claim, where)
        check_volume(found, claim, where)
        found = self._migrated(found, where)
        check_mode(found, pod, volume)
        labels = self._node_labels()
        if labels is not None:
            check_affinity(found, labels, self._node_name)
        return wanted_volume(pod, volume, claim, found)

    def _migrated(self, found: PersistentVolume, where: str) -> PersistentVolume:
        if not any(kind in MIGRATED and kind not in self._given for kind, _ in found.spec.sources):
            return found
        from pykubelet.volumes.csi.migrated import migrated_volume

        try:
            return migrated_volume(found)
        except (KindError, ValueError) as err:
            raise ClaimError(f"error processing PVC {where}: {err}") from err

    async def _claim(self, api: ApiClient, namespace: str, name: str) -> PersistentVolumeClaim:
        try:
            return await until_seen(lambda: api.get(CLAIMS, name, namespace))
        except KubeError as err:
            what = f"error processing PVC {namespace}/{name}: failed to fetch PVC from API server"
            raise _problem(what, err) from err

    async def _volume(self, api: ApiClient, claim: PersistentVolumeClaim, where: str) -> PersistentVolume:
        name = claim.spec.volume_name
        try:
            return await until_seen(lambda: api.get(PERSISTENT_VOLUMES, name))
        except KubeError as err:
            what = f"error processing PVC {where}: failed to fetch PV {name} from API server"
            raise _problem(what, err) from err


def _problem(what: str, err: KubeError) -> ClaimError:
    if isinstance(err, ApiError):
        return ClaimError(f"{what}: {err.message or err}")
    return ServerAway(f"{what}: {err}")
