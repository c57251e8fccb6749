"""What a running pod's status tells of its resources: as the reference told it of the recorded pods."""

import os
from typing import Any

import pytest

from pykubelet.cm.cgroups.pod_cgroups import resources_in_force
from pykubelet.cm.cgroups.values import PodPolicy, pod_values
from tests.support.pod_resources import pod_of

pytestmark = pytest.mark.skipif(os.sysconf("SC_PAGE_SIZE") != 4096, reason="the recorded pages are 4 KiB")

NO_LIMIT = "9007199254740988Ki"
"""What cgroup v1 has for none."""


def told(*containers: dict[str, Any], unified: bool = False, **spec: Any) -> dict[str, dict[str, str]]:
    pod = pod_of(*containers, **spec)
    limits, requests = resources_in_force(pod, pod_values(pod, PodPolicy()), unified=unified)
    found = {"limits": limits, "requests": requests}
    return {
        kind: {name: str(amount) for name, amount in amounts.items()}
        for kind, amounts in found.items()
        if amounts
    }


@pytest.mark.parametrize(
    ("container", "expected"),
    [
        ({}, {"limits": {"memory": NO_LIMIT}}),
        (
            {"requests": {"cpu": "100m", "memory": "32Mi"}, "limits": {"cpu": "500m", "memory": "64Mi"}},
            {"limits": {"cpu": "500m", "memory": "64Mi"}, "requests": {"cpu": "100m", "memory": "32Mi"}},
        ),
        # What no cgroup bounds is not told.
        (
            {"limits": {"cpu": "250m", "memory": "48Mi", "ephemeral-storage": "100Mi"}},
            {"limits": {"cpu": "250m", "memory": "48Mi"}, "requests": {"cpu": "250m", "memory": "48Mi"}},
        ),
        (
            {"requests": {"memory": "32Mi"}, "limits": {"cpu": "300m"}},
            {
                "limits": {"cpu": "300m", "memory": NO_LIMIT},
                "requests": {"cpu": "300m", "memory": "32Mi"},
            },
        ),
        # Less than the kernel's least is nothing that was promised.
        ({"requests": {"cpu": "1m"}}, {"limits": {"memory": NO_LIMIT}}),
        ({"requests": {"cpu": "3m"}}, {"limits": {"memory": NO_LIMIT}, "requests": {"cpu": "3m"}}),
        # Memory is given in whole pages.
        (
            {"requests": {"cpu": "1"}, "limits": {"memory": "5000"}},
            {"limits": {"memory": "4Ki"}, "requests": {"cpu": "1", "memory": "5k"}},
        ),
    ],
)
def test_resources_in_force_container_resources_equals_upstream(
    container: dict[str, Any], expected: dict[str, Any]
) -> None:
    assert told(container) == expected
    if expected["limits"]["memory"] == NO_LIMIT:
        bounded = {name: amount for name, amount in expected["limits"].items() if name != "memory"}
        expected = {**({"limits": bounded} if bounded else {}), "requests": expected.get("requests")}
    assert told(container, unified=True) == {kind: amounts for kind, amounts in expected.items() if amounts}
