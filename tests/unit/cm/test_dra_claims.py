"""Which claims a pod has, whether it may use them, which devices a container gets; and what answers mean."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pykubelet.api.meta import OwnerReference, from_document
from pykubelet.api.pod import Pod, PodSchedulingGroup
from pykubelet.api.resource_claim import Consumer, ResourceClaim
from pykubelet.cm.dra import dra_pb2 as pb
from pykubelet.cm.dra.claims import (
    ClaimError,
    ClaimInfo,
    PodClaim,
    PreparedDevice,
    drivers_of,
    pod_claims,
    requests_of,
    serves,
)
from pykubelet.cm.dra.manager import by_driver, check_unprepared, read_prepared

EXTENDED = {
    "resourceClaimName": "extra",
    "requestMappings": [
        {"containerName": "main", "resourceName": "example.com/gpu", "requestName": "container-0-request-0"},
        {"containerName": "main", "resourceName": "example.com/nic", "requestName": "container-0-request-1"},
        {"containerName": "other", "resourceName": "example.com/gpu", "requestName": "container-1-request-0"},
        {
            "containerName": "main",
            "resourceName": "deviceclass.resource.kubernetes.io/big",
            "requestName": "container-0-request-2",
        },
    ],
}


def pod_with(
    claims: list[dict[str, Any]],
    status: dict[str, Any] | None = None,
    resources: dict[str, Any] | None = None,
) -> Pod:
    return from_document(
        Pod,
        {
            "metadata": {"name": "p", "namespace": "ns", "uid": "pod-1"},
            "spec": {
                "resourceClaims": claims,
                "containers": [{"name": "main", "resources": resources or {}}, {"name": "other"}],
            },
            "status": status or {},
        },
    )


NAMED = {"name": "gpu", "resourceClaimName": "shared"}
MADE = {"name": "nic", "resourceClaimTemplateName": "t"}


@pytest.mark.parametrize(
    ("claims", "status", "wanted"),
    [
        ([], {}, []),
        ([NAMED], {}, [PodClaim("shared")]),
        (
            [NAMED, MADE],
            {"resourceClaimStatuses": [{"name": "nic", "resourceClaimName": "p-nic-x7"}]},
            [PodClaim("shared"), PodClaim("p-nic-x7", created_for_pod=True)],
        ),
        ([MADE], {"resourceClaimStatuses": [{"name": "nic"}]}, []),
        ([NAMED, {"name": "again", "resourceClaimName": "shared"}], {}, [PodClaim("shared")]),
        ([], {"extendedResourceClaimStatus": EXTENDED}, [PodClaim("extra")]),
        ([MADE], {}, 'pod "ns/p": ResourceClaim not created yet'),
        (
            [{"name": "odd"}],
            {},
            'pod "ns/p", spec.resourceClaim "odd": none of the supported fields are set',
        ),
    ],
)
def test_pod_claims_spec_and_status_returns_claims_or_error(
    claims: list[dict[str, Any]], status: dict[str, Any], wanted: list[PodClaim] | str
) -> None:
    pod = pod_with(claims, status)
    if isinstance(wanted, str):
        with pytest.raises(ClaimError) as caught:
            pod_claims(pod)
        assert str(caught.value) == wanted
    else:
        assert pod_claims(pod) == wanted


def test_pod_claims_extended_disabled_ignores_extended_claim() -> None:
    pod = pod_with([], {"extendedResourceClaimStatus": EXTENDED})
    assert pod_claims(pod, extended=False) == []


def claim(owner: str = "pod-1", reserved: str = "pod-1", drivers: tuple[str, ...] | None = ("b", "a")) -> Any:
    status: dict[str, Any] = {"reservedFor": [{"resource": "pods", "name": "p", "uid": reserved}]}
    if drivers is not None:
        results = [
            {"request": "r", "driver": one, "pool": "x", "device": "d", "adminAccess": True, "shareID": "s"}
            for one in drivers
        ]
        status["allocation"] = {"devices": {"results": results}}
    owners = [{"apiVersion": "v1", "kind": "Pod", "name": "p", "uid": owner, "controller": True}]
    meta = {"name": "c", "namespace": "ns", "uid": "claim-1", "ownerReferences": owners}
    return from_document(ResourceClaim, {"metadata": meta, "status": status})


@pytest.mark.parametrize(
    ("found", "made", "said"),
    [
        (claim(), True, ["a", "b"]),
        (claim(owner="else"), False, ["a", "b"]),
        (claim(drivers=("a", "a")), True, ["a"]),
        (claim(drivers=()), True, []),
        (claim(owner="else"), True, "ResourceClaim ns/c was not created for Pod ns/p (Pod is not owner)"),
        (claim(reserved="else"), True, "pod p (pod-1) is not allowed to use ResourceClaim c (claim-1)"),
        (claim(drivers=None), True, "ResourceClaim c: not allocated"),
    ],
)
def test_drivers_of_claim_checks_owner_reservation_and_allocation(
    found: ResourceClaim, made: bool, said: list[str] | str
) -> None:
    pod, wanted = pod_with([NAMED]), PodClaim("c", created_for_pod=made)
    if isinstance(said, str):
        with pytest.raises(ClaimError) as caught:
            drivers_of(pod, wanted, found)
        assert str(caught.value) == said
    else:
        assert drivers_of(pod, wanted, found) == said


GROUP_OWNER = {"apiVersion": "scheduling.k8s.io/v1beta1", "kind": "PodGroup", "name": "g", "uid": "group-1"}
GROUP_CONSUMER = {"apiGroup": "scheduling.k8s.io", "resource": "podgroups", "name": "g", "uid": "group-1"}


def group_claim(owner: dict[str, Any], consumer: dict[str, Any]) -> ResourceClaim:
    found: ResourceClaim = claim()
    found.metadata.owner_references = [from_document(OwnerReference, {"controller": True, **owner})]
    found.status.reserved_for = [from_document(Consumer, consumer)]
    return found


@pytest.mark.parametrize(
    ("owner", "consumer", "problem"),
    [
        ({}, {}, ""),
        ({"apiVersion": "example.com/v1"}, {}, r"\(neither Pod nor PodGroup g is the owner\)"),
        ({"name": "other"}, {}, r"\(neither Pod nor PodGroup g is the owner\)"),
        ({"controller": False}, {}, r"\(neither Pod nor PodGroup g is the owner\)"),
        ({}, {"name": "other"}, "is not allowed to use"),
        ({}, {"apiGroup": ""}, "is not allowed to use"),
        ({}, {"resource": "pods"}, "is not allowed to use"),
    ],
)
def test_drivers_of_claim_of_pod_group_only_with_gate(
    owner: dict[str, Any], consumer: dict[str, Any], problem: str
) -> None:
    found = group_claim({**GROUP_OWNER, **owner}, {**GROUP_CONSUMER, **consumer})
    pod, wanted = pod_with([NAMED]), PodClaim("c", created_for_pod=True)
    with pytest.raises(ClaimError, match=r"\(Pod is not owner\)"):
        drivers_of(pod, wanted, found, pod_groups=True)
    pod.spec.scheduling_group = PodSchedulingGroup(pod_group_name="g")
    with pytest.raises(ClaimError, match=r"\(Pod is not owner\)"):
        drivers_of(pod, wanted, found, pod_groups=False)
    if problem:
        with pytest.raises(ClaimError, match=problem):
            drivers_of(pod, wanted, found, pod_groups=True)
    else:
        assert drivers_of(pod, wanted, found, pod_groups=True) == ["a", "b"]


@pytest.mark.parametrize(
    ("used", "amounts", "found"),
    [
        ([], {}, {}),
        ([{"name": "gpu"}], {}, {"shared": [""]}),
        ([{"name": "gpu", "request": "a"}, {"name": "gpu", "request": "b"}], {}, {"shared": ["a", "b"]}),
        ([{"name": "nic", "request": "r"}], {}, {"p-nic-x7": ["r"]}),
        ([], {"example.com/gpu": "2", "cpu": "1"}, {"extra": ["container-0-request-0"]}),
        ([], {"example.com/gpu": "0"}, {}),
        (
            [{"name": "gpu"}],
            {"example.com/nic": "1", "deviceclass.resource.kubernetes.io/big": "1"},
            {"shared": [""], "extra": ["container-0-request-1", "container-0-request-2"]},
        ),
    ],
)
def test_requests_of_container_returns_requests_by_claim(
    used: list[dict[str, str]], amounts: dict[str, str], found: dict[str, list[str]]
) -> None:
    status = {
        "resourceClaimStatuses": [{"name": "nic", "resourceClaimName": "p-nic-x7"}],
        "extendedResourceClaimStatus": EXTENDED,
    }
    pod = pod_with([NAMED, MADE], status, {"claims": used, "requests": amounts, "limits": amounts})
    assert requests_of(pod, pod.spec.containers[0]) == found
    assert requests_of(pod, pod.spec.containers[1]) == {}
    only_claims = {name: requests for name, requests in found.items() if name != "extra"}
    assert requests_of(pod, pod.spec.containers[0], extended=False) == only_claims


@pytest.mark.parametrize(
    ("request_name", "names", "fits"),
    [
        ("", ["a"], True),
        ("a", [], True),
        ("a", ["a"], True),
        ("a", ["b", "a"], True),
        ("a", ["b"], False),
        ("a", ["a/small"], True),
        ("a/small", ["a"], True),
        ("a/small", ["a/small"], True),
        ("a/small", ["a/large"], False),
        ("a", ["ab"], False),
        ("ab", ["a"], False),
    ],
)
def test_serves_request_matches_names_and_subrequests(
    request_name: str, names: list[str], fits: bool
) -> None:
    assert serves(request_name, names) is fits


def test_claim_info_cdi_devices_filtered_by_request_and_sorted() -> None:
    record = ClaimInfo("ns", "c", "u")
    record.devices = {
        "z": (PreparedDevice("p", "1", ("a",), ("z/x=1", "z/x=2")), PreparedDevice("p", "2", (), ("z/x=3",))),
        "b": (PreparedDevice("p", "1", ("b/sub",), ("b/x=1",)),),
        "none": (),
    }
    assert list(record.cdi_devices()) == ["b/x=1", "z/x=1", "z/x=2", "z/x=3"]
    assert list(record.cdi_devices("a")) == ["z/x=1", "z/x=2", "z/x=3"]
    assert list(record.cdi_devices("b")) == ["b/x=1", "z/x=3"]
    assert list(record.cdi_devices("else")) == ["z/x=3"]


ASKED = [ClaimInfo("ns", name, f"uid-{name}", devices={"d": ()}) for name in ("one", "two")]


@pytest.mark.parametrize(
    ("answered", "said"),
    [
        ({"uid-one": "", "uid-two": ""}, ""),
        ({"uid-one": "", "uid-two": "full"}, "{} failed for ResourceClaim two: full"),
        ({"uid-one": ""}, "{} skipped 1 ResourceClaims"),
        ({}, "{} skipped 2 ResourceClaims"),
        ({"uid-one": "", "uid-two": "", "uid-x": ""}, "{} returned result for unknown claim UID uid-x"),
        ({"uid-one": "", "uid-x": ""}, "{} returned result for unknown claim UID uid-x"),
    ],
)
def test_read_prepared_and_check_unprepared_invalid_response_raises(
    answered: dict[str, str], said: str
) -> None:
    prepared, unprepared = pb.NodePrepareResourcesResponse(), pb.NodeUnprepareResourcesResponse()
    for uid, error in answered.items():
        prepared.claims[uid].error = unprepared.claims[uid].error = error
        device = prepared.claims[uid].devices.add(pool_name="p", device_name="d", request_names=["r"])
        device.cdi_device_ids.append(f"v/c={uid}")
    if not said:
        check_unprepared(ASKED, unprepared)
        assert read_prepared(ASKED, prepared) == {
            uid: (PreparedDevice("p", "d", ("r",), (f"v/c={uid}",), None),) for uid in answered
        }
        return
    with pytest.raises(ClaimError) as caught:
        read_prepared(ASKED, prepared)
    assert str(caught.value) == said.format("NodePrepareResources")
    with pytest.raises(ClaimError) as caught:
        check_unprepared(ASKED, unprepared)
    assert str(caught.value) == said.format("NodeUnprepareResources")


def test_read_prepared_returns_share_id() -> None:
    answer = pb.NodePrepareResourcesResponse()
    answer.claims["uid-one"].devices.add(pool_name="p", device_name="d", share_id="")
    answer.claims["uid-one"].devices.add(pool_name="p", device_name="e", share_id="s-1")
    found = read_prepared(ASKED[:1], answer)["uid-one"]
    assert [device.share_id for device in found] == ["", "s-1"]


@given(st.lists(st.sets(st.sampled_from("abc"))))
def test_by_driver_groups_claims_per_driver(drivers: list[set[str]]) -> None:
    records = [
        ClaimInfo("ns", f"c{number}", str(number), devices=dict.fromkeys(sorted(mine), ()))
        for number, mine in enumerate(drivers)
    ]
    batches = by_driver(records)
    assert list(batches) == sorted(batches)
    assert all(batches.values())
    assert {(driver, one.uid) for driver, batch in batches.items() for one in batch} == {
        (driver, str(number)) for number, mine in enumerate(drivers) for driver in mine
    }
