"""Claims of a pod that is so new that the API server does not know yet that it is this node's."""

from pathlib import Path
from typing import Any

import pytest

from pykubelet.apiserver.client import Resource, T
from pykubelet.apiserver.errors import Forbidden
from tests.support.volumes import Server, Shelf, pod_with, volumes_at

CLAIM = {"name": "data", "persistentVolumeClaim": {"claimName": "claim"}}


class Behind(Server):
    """An API server that refuses the first requests for each object."""

    def __init__(self, refusals: int) -> None:
        super().__init__()
        self.refusals = refusals
        self.refused: dict[str, int] = {}

    async def get(self, resource: Resource[T], name: str, namespace: str = "", *, params: Any = ()) -> T:
        count = self.refused.get(name, 0)
        if count < self.refusals:
            self.refused[name] = count + 1
            raise Forbidden(403, "Forbidden", "no relationship found between node 'one' and this object")
        return await super().get(resource, name, namespace, params=params)


@pytest.mark.looptime
async def test_mount_claim_forbidden_for_new_pod_is_retried(root: Path, shelf: Shelf, tmp_path: Path) -> None:
    server = Behind(refusals=2)
    server.claim("claim", "pv-1")
    server.volume("pv-1", "claim", hostPath={"path": str(tmp_path)})
    volumes = volumes_at(root, shelf, server=server, node_labels=dict)
    mounted = await volumes.mount(pod_with(CLAIM))
    assert mounted["data"].path == str(tmp_path)
    assert server.refused == {"claim": 2, "pv-1": 2}
