"""Extended resources for which the scheduler made a claim are not the node's to count."""

import pytest

from pykubelet.admission.handler import Usage
from pykubelet.admission.predicates import as_amounts, insufficient_resources
from pykubelet.api.meta import from_document
from pykubelet.api.pod import Pod

NAMES = ("example.com/gpu", "deviceclass.resource.kubernetes.io/big")


def pod_of(*resources: str, claimed: tuple[str, ...] = ()) -> Pod:
    mappings = [{"containerName": "c", "resourceName": name, "requestName": "r"} for name in claimed]
    status = {"extendedResourceClaimStatus": {"resourceClaimName": "x", "requestMappings": mappings}}
    container = {"name": "c", "resources": {"requests": dict.fromkeys(resources, "1")}}
    return from_document(Pod, {"spec": {"containers": [container]}, "status": status if claimed else {}})


@pytest.mark.parametrize("name", NAMES)
def test_insufficient_resources_extended_resource_with_claim_not_counted(name: str) -> None:
    def short(pod: Pod, has: dict[str, int]) -> list[str]:
        found = insufficient_resources(
            pod,
            Usage(0, {}),
            {"pods": 10, **has},
            lambda one: as_amounts(one.spec.containers[0].resources.requests),
        )
        return [one.reason for one in found]

    # A node says that it has none when a device plugin was there once.
    assert short(pod_of(name), {name: 0}) == [f"OutOf{name}"]
    assert short(pod_of(name, claimed=(name,)), {name: 0}) == []
    assert short(pod_of(name, "cpu", claimed=(name,)), {}) == ["OutOfcpu"]
    assert short(pod_of(*NAMES, claimed=(name,)), dict.fromkeys(NAMES, 0)) == [
        f"OutOf{other}" for other in NAMES if other != name
    ]
