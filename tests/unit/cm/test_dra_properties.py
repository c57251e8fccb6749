"""Whatever happens to pods, drivers and the agent, in any order: nothing that a driver made is forgotten."""

import asyncio
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

from hypothesis import given, settings
from hypothesis import strategies as st

from pykubelet.api.meta import from_document
from pykubelet.api.pod import Pod
from pykubelet.api.resource_claim import ResourceClaim
from pykubelet.cm.dra import dra_pb2 as pb
from pykubelet.cm.dra.claims import ClaimError, ClaimInfo, decode
from pykubelet.cm.dra.manager import DraManager
from pykubelet.cm.dra.plugins import DraPluginRegistry
from pykubelet.pluginmanager.client import PluginError

CLAIMS = {"a": ("x",), "b": ("x", "y"), "c": ("y",)}
PODS = {"p": ("a",), "q": ("a", "b"), "r": ("b", "c")}


class FakeDrivers:
    """Drivers x and y: they remember what they have prepared, and fail when told to, before or after."""

    def __init__(self) -> None:
        self.prepared: set[tuple[str, str]] = set()
        self.mood = "well"

    def add_listener(self, listener: Any) -> None: ...

    def forget(self, uid: str) -> None: ...

    def needed(self, driver: str, uid: str) -> Any:
        return self.get(driver)

    def get(self, driver: str) -> Any:
        if self.mood == "away":
            raise ClaimError(f"DRA driver {driver} is not registered")
        return FakePlugin(self, driver)


class FakePlugin:
    """One of them."""

    def __init__(self, drivers: FakeDrivers, name: str) -> None:
        self._all = drivers
        self._name = name

    async def prepare(self, claims: Sequence[ClaimInfo]) -> pb.NodePrepareResourcesResponse:
        await self._before()
        answer = pb.NodePrepareResourcesResponse()
        for claim in claims:
            self._all.prepared.add((self._name, claim.name))
            answer.claims[claim.uid].devices.add(pool_name="p", device_name=claim.name)
        await self._after()
        return answer

    async def unprepare(self, claims: Sequence[ClaimInfo]) -> pb.NodeUnprepareResourcesResponse:
        await self._before()
        answer = pb.NodeUnprepareResourcesResponse()
        for claim in claims:
            self._all.prepared.discard((self._name, claim.name))
            answer.claims[claim.uid].error = ""
        await self._after()
        return answer

    async def _before(self) -> None:
        if self._all.mood == "fails":
            raise PluginError("Internal", "no")
        await asyncio.sleep(0.001)

    async def _after(self) -> None:
        await asyncio.sleep(0.001)
        if self._all.mood == "dies after":
            raise PluginError("Unavailable", "gone")


def pod_of(uid: str) -> Pod:
    claims = [{"name": name, "resourceClaimName": name} for name in PODS[uid]]
    meta = {"name": uid, "namespace": "ns", "uid": uid}
    return from_document(Pod, {"metadata": meta, "spec": {"resourceClaims": claims, "containers": []}})


async def fetch(namespace: str, name: str) -> ResourceClaim:
    results = [{"driver": driver} for driver in CLAIMS[name]]
    return from_document(
        ResourceClaim,
        {
            "metadata": {"name": name, "namespace": namespace, "uid": f"uid-{name}"},
            "status": {
                "allocation": {"devices": {"results": results}},
                "reservedFor": [{"uid": uid} for uid in PODS],
            },
        },
    )


STEPS = st.lists(
    st.tuples(st.just("prepare"), st.sampled_from([*PODS]))
    | st.tuples(st.just("unprepare"), st.sampled_from([*PODS]))
    | st.tuples(st.just("both"), st.permutations([*PODS]).map(" ".join))
    | st.tuples(st.just("mood"), st.sampled_from(["well", "fails", "dies after", "away"]))
    | st.tuples(st.just("agent dies"), st.just("")),
    max_size=14,
)


@settings(max_examples=60)
@given(STEPS)
def test_dra_manager_any_operations_every_prepared_claim_checkpointed(steps: list[tuple[str, str]]) -> None:
    # In memory, because every step is written down for good.
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        asyncio.run(_walk(Path(folder), steps))


async def _walk(folder: Path, steps: list[tuple[str, str]]) -> None:
    drivers = FakeDrivers()

    def agent() -> DraManager:
        return DraManager(folder, fetch, cast(DraPluginRegistry, drivers))

    claims, ready = agent(), set[str]()

    async def do(what: str, uid: str) -> None:
        try:
            if what == "prepare":
                await claims.prepare(pod_of(uid))
                ready.add(uid)
            else:
                ready.discard(uid)
                await claims.unprepare(uid)
        except ClaimError:
            assert drivers.mood != "well"

    for what, which in steps:
        if what == "mood":
            drivers.mood = which
        elif what == "agent dies":
            claims = agent()
        elif what == "both":
            first, second, _ = which.split()
            await asyncio.gather(do("unprepare", first), do("prepare", second))
        else:
            await do(what, which)
        records = decode((folder / "dra_manager_state").read_bytes())
        kept = {record.name for record in records}
        assert {name for _, name in drivers.prepared} <= kept, "the next agent would not know of it"
        for uid in ready:
            wanted = {(driver, name) for name in PODS[uid] for driver in CLAIMS[name]}
            assert wanted <= drivers.prepared, "a pod that runs has what it was given"
            assert all(uid in record.pods for record in records if record.name in PODS[uid])
    drivers.mood = "well"
    for uid in PODS:
        await claims.unprepare(uid)
    assert drivers.prepared == set()
    assert decode((folder / "dra_manager_state").read_bytes()) == []
