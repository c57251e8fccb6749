"""Room and place: the account of what is there, and who has to go for a critical pod."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pykubelet.admission.handler import AdmitRejection, AdmitResult, Preempt, Usage
from pykubelet.admission.predicates import (
    NoPreemptionVictims,
    Predicates,
    choose_victims,
    failed_predicates,
    insufficient_resources,
    may_preempt,
    tolerates,
)
from pykubelet.api.node import Taint
from pykubelet.api.pod import Pod, Toleration
from pykubelet.cm.qos import qos_class
from tests.support.admission import asking, attempt, node, pod, requests_of, surroundings

SYSTEM = 2_000_000_000


def ask(one: Pod, *others: Pod, **at: Any) -> AdmitResult:
    return Predicates(surroundings()).admit(attempt(one, *others, **at))


@pytest.mark.parametrize(
    ("wanted", "others", "reason", "numbers"),
    [
        ({}, [], None, ()),
        ({"cpu": "2", "memory": "1Gi"}, [], None, ()),
        ({"cpu": "2001m"}, [], "OutOfcpu", (2001, 0, 2000)),
        ({"cpu": "1500m"}, [{"cpu": "501m"}], "OutOfcpu", (1500, 501, 2000)),
        ({"cpu": "1500m"}, [{"cpu": "500m"}], None, ()),
        ({"memory": "1Gi"}, [{"memory": "1"}], "OutOfmemory", (2**30, 1, 2**30)),
        (
            {"ephemeral_storage": "20Gi"},
            [],
            "OutOfephemeral-storage",
            (20 * 2**30, 0, 10 * 2**30),
        ),
        ({}, [{}, {}, {}], "OutOfpods", (1, 3, 3)),
        # Who asks for nothing gets in, however full it is.
        ({}, [{"cpu": "9"}], None, ()),
        ({"memory": "1"}, [{"cpu": "9"}], None, ()),
        # The first one is told, and pods come first.
        ({"cpu": "9", "memory": "9Gi"}, [], "OutOfcpu", (9000, 0, 2000)),
        ({"cpu": "9"}, [{}, {}, {}], "OutOfpods", (1, 3, 3)),
        # Huge pages are the node's; a resource of others that it does not know is not.
        ({"hugepages_2Mi": "2Mi"}, [], "OutOfhugepages-2Mi", (2**21, 0, 0)),
        ({"dongle": "1"}, [], None, ()),
    ],
)
def test_predicates_insufficient_resources_rejected_with_amounts(
    wanted: dict[str, Any], others: list[dict[str, Any]], reason: str | None, numbers: tuple[int, ...]
) -> None:
    there = [asking(f"other-{number}", **texts) for number, texts in enumerate(others)]
    answer = ask(asking(**wanted), *there)
    if reason is None:
        assert answer is None
        return
    requested, used, capacity = numbers
    message = (
        f"Node didn't have enough resource: {reason.removeprefix('OutOf')}, requested: {requested}, "
        f"used: {used}, capacity: {capacity}"
    )
    assert answer == AdmitRejection(reason, message)


@pytest.mark.parametrize(("there", "held", "refused"), [("2", 1, False), ("2", 2, True), ("0", 0, True)])
def test_predicates_extended_resource_exhausted_rejected(there: str, held: int, refused: bool) -> None:
    others = [asking(f"other-{number}", dongle="1") for number in range(held)]
    answer = ask(asking(dongle="1"), *others, at=node(dongle=there))
    message = (
        f"Node didn't have enough resource: example.com/dongle, requested: 1, used: {held}, capacity: {there}"
    )
    assert answer == (AdmitRejection("OutOfexample.com/dongle", message) if refused else None)


def test_insufficient_resources_init_containers_and_overhead_included() -> None:
    big = {"name": "first", "resources": {"requests": {"cpu": "1900m"}}}
    asked = pod(initContainers=[big], overhead={"cpu": "200m"})
    found = insufficient_resources(asked, Usage(0, {}), {"cpu": 2000, "pods": 9}, requests_of)
    assert [one.requested for one in found] == [2100]


def required(*terms: dict[str, Any]) -> dict[str, Any]:
    name = "requiredDuringSchedulingIgnoredDuringExecution"
    return {"affinity": {"nodeAffinity": {name: {"nodeSelectorTerms": list(terms)}}}}


def expression(key: str, operator: str, *values: str) -> dict[str, Any]:
    return {"matchExpressions": [{"key": key, "operator": operator, "values": list(values)}]}


def ports(*many: dict[str, Any]) -> dict[str, Any]:
    return {"containers": [{"name": "main", "ports": [{"containerPort": 80, **port} for port in many]}]}


BY_NAME = {"matchFields": [{"key": "metadata.name", "operator": "In", "values": ["n1"]}]}


@pytest.mark.parametrize(
    ("spec", "reason"),
    [
        ({"nodeSelector": {"zone": "a", "kubernetes.io/os": "linux"}}, None),
        ({"nodeSelector": {"zone": "b"}}, "NodeAffinity"),
        ({"nodeSelector": {"kubernetes.io/arch": "arm64"}}, "NodeAffinity"),
        (required(expression("zone", "In", "a", "b")), None),
        (required(expression("zone", "NotIn", "a")), "NodeAffinity"),
        (required(expression("zone", "NotIn", "a"), expression("zone", "Exists")), None),
        (required(BY_NAME), None),
        (required({}), "NodeAffinity"),
        (required(), "NodeAffinity"),
        # A term that nobody understands chooses nothing, and takes nothing from others.
        (required(expression("zone", "Like", "a")), "NodeAffinity"),
        (required(expression("zone", "Like", "a"), BY_NAME), None),
        ({"nodeSelector": {"zone": "b"}, **required(BY_NAME)}, "NodeAffinity"),
        ({"nodeName": "n2"}, "NodeName"),
        ({"nodeName": ""}, None),
        (ports({"hostPort": 80}), "NodePorts"),
        (ports({"hostPort": 80, "hostIP": "10.0.0.1"}), "NodePorts"),
        (ports({"hostPort": 80, "protocol": "UDP"}), None),
        (ports({"hostPort": 81}), "NodePorts"),
        (ports({"hostPort": 81, "hostIP": "10.0.0.1"}), "NodePorts"),
        (ports({"hostPort": 81, "hostIP": "10.0.0.2"}), None),
        (ports({"containerPort": 80}), None),
    ],
)
def test_failed_predicates_node_name_affinity_and_host_ports(
    spec: dict[str, Any], reason: str | None
) -> None:
    other = pod("other", **ports({"hostPort": 80}, {"hostPort": 81, "hostIP": "10.0.0.1"}))
    found = [one.reason for one in failed_predicates(pod(**spec), node({"zone": "a"}), [other])]
    assert found == ([reason] if reason else [])


def test_failed_predicates_init_container_ports_counted_only_for_sidecars() -> None:
    for policy, taken in ((None, False), ("Always", True)):
        init = {"name": "first", "restartPolicy": policy, "ports": [{"hostPort": 80}]}
        found = failed_predicates(
            pod(**ports({"hostPort": 80})), node(), [pod("other", initContainers=[init])]
        )
        assert bool(found) is taken


@pytest.mark.parametrize(
    ("toleration", "tolerated"),
    [
        ({"operator": "Exists"}, True),
        ({"key": "k", "value": "5"}, True),
        ({"key": "k", "operator": "Equal", "value": "5"}, True),
        ({"key": "k", "value": "6"}, False),
        ({"key": "other", "operator": "Exists"}, False),
        ({"key": "k", "operator": "Exists", "effect": "NoSchedule"}, False),
        ({"key": "k", "operator": "Exists", "effect": "NoExecute"}, True),
        ({"key": "k", "operator": "Gt", "value": "4"}, True),
        ({"key": "k", "operator": "Gt", "value": "5"}, False),
        ({"key": "k", "operator": "Lt", "value": "6"}, True),
        ({"key": "k", "operator": "Lt", "value": "06"}, False),
        ({"key": "k", "operator": "Lt", "value": "many"}, False),
        ({"key": "k", "operator": "Lt", "value": "9223372036854775808"}, False),
        ({"key": "k", "operator": "Odd", "value": "5"}, False),
    ],
)
def test_tolerates_by_operator_key_and_value(toleration: dict[str, Any], tolerated: bool) -> None:
    taint = Taint(key="k", value="5", effect="NoExecute")
    one = Toleration(**toleration)
    assert tolerates(one, taint, comparing=True) is tolerated
    assert tolerates(one, taint) is (tolerated and one.operator not in ("Lt", "Gt"))


def test_predicates_only_no_execute_taints_reject_and_not_static_pods() -> None:
    here = node()
    here.spec.taints = [Taint(key="a", effect="NoSchedule"), Taint(key="b", effect="PreferNoSchedule")]
    assert ask(pod(), at=here) is None
    here.spec.taints.append(Taint(key="c", effect="NoExecute"))
    message = "Predicate TaintToleration failed: node(s) had taints that the pod didn't tolerate"
    assert ask(pod(), at=here) == AdmitRejection("TaintToleration", message)
    assert ask(pod(source="file"), at=here) is None


def test_predicates_node_affinity_alone_failed_rejection_is_stale() -> None:
    message = "Predicate NodeAffinity failed: node(s) didn't match Pod's node affinity/selector"
    wanting: dict[str, Any] = {"nodeSelector": {"zone": "b"}}
    assert ask(pod(**wanting)) == AdmitRejection("NodeAffinity", message, stale=True)
    # With anything else that speaks against the pod, the node need not be asked for again.
    assert ask(pod(**wanting, nodeName="n2")) == AdmitRejection("NodeAffinity", message)
    refusal = ask(pod(**wanting), *(pod(f"other-{n}") for n in range(3)))
    assert isinstance(refusal, AdmitRejection)
    assert (refusal.reason, refusal.stale) == ("OutOfpods", False)


def test_predicates_critical_pod_preempts_for_resources_not_for_affinity() -> None:
    full = asking("full", cpu="2")
    critical: dict[str, Any] = {
        "containers": [{"name": "main", "resources": {"requests": {"cpu": "1"}}}],
        "priority": SYSTEM,
    }
    assert ask(pod(**critical), full) == Preempt([full], "cpu")
    refusal = ask(pod(nodeSelector={"zone": "b"}, **critical), full)
    assert isinstance(refusal, AdmitRejection)
    assert (refusal.reason, refusal.stale) == ("NodeAffinity", False)
    # Other pods that must be here do not go for it, and no more can be had than there is.
    static = pod("static", source="file", containers=critical["containers"])
    for answer, missing in (
        (ask(pod(**critical), static, static), 1000),
        (ask(asking(cpu="5", priority=SYSTEM), asking("small", cpu="100m")), 3000),
    ):
        assert answer == AdmitRejection(
            "UnexpectedAdmissionError",
            "Unexpected error while attempting to recover from admission failure: preemption: error finding "
            "a set of pods to preempt: no set of running pods found to reclaim resources: "
            f"[(res: cpu, q: {missing}), ]",
        )


@pytest.mark.parametrize(
    ("mine", "theirs", "allowed"),
    [
        (pod(priority=SYSTEM), pod(), True),
        (pod(source="file"), pod(priority=5), True),
        (pod(source="file"), pod(source="file"), False),
        (pod(priority=SYSTEM), pod(source="file"), False),
        (pod(priority=SYSTEM + 1), pod(priority=SYSTEM), True),
        (pod(priority=SYSTEM), pod(priority=SYSTEM), False),
        (pod(priority=2), pod(priority=1), True),
        (pod(priority=2), pod(), False),
        (pod(), pod(), False),
    ],
)
def test_may_preempt_by_priority_and_source(mine: Pod, theirs: Pod, allowed: bool) -> None:
    assert may_preempt(mine, theirs) is allowed


TINY = asking("tiny", cpu="1m", memory="1Mi")
BURSTABLE = asking("burstable", cpu="100m", memory="100Mi")
HIGH = asking("high-request", cpu="300m", memory="300Mi")
GUARANTEED = asking("guaranteed", limits=True, cpu="100m", memory="100Mi")
HIGH_GUARANTEED = asking("high-guaranteed", limits=True, cpu="300m", memory="300Mi")
BEST_EFFORT = asking("best-effort")
MEMORY_ONLY = asking("memory", memory="100Mi")
CRITICAL = pod("critical", priority=SYSTEM)


@pytest.mark.parametrize(
    ("others", "missing", "chosen"),
    [
        ([BEST_EFFORT, BURSTABLE], {}, []),
        # One pod suffices, and the least important one that does.
        ([BEST_EFFORT, TINY, BURSTABLE, GUARANTEED], {"pods": 1}, ["best-effort"]),
        ([TINY, BURSTABLE, GUARANTEED], {"cpu": 50}, ["burstable"]),
        ([GUARANTEED, BURSTABLE], {"cpu": 200}, ["burstable", "guaranteed"]),
        # As few as possible: the largest that is needed rather than many small ones.
        ([TINY, BURSTABLE, HIGH], {"cpu": 250}, ["high-request"]),
        ([TINY, BURSTABLE, HIGH], {"cpu": 350}, ["high-request", "burstable"]),
        # Not more than is needed.
        ([HIGH, BURSTABLE], {"cpu": 100, "memory": 100 * 2**20}, ["burstable"]),
        ([MEMORY_ONLY, BURSTABLE], {"memory": 2**20}, ["memory"]),
        # A guaranteed pod goes only for what all others cannot give, and then lesser ones may stay.
        ([BURSTABLE, HIGH_GUARANTEED], {"cpu": 250}, ["high-guaranteed"]),
        ([BURSTABLE, GUARANTEED, HIGH_GUARANTEED], {"cpu": 400}, ["burstable", "high-guaranteed"]),
        ([BEST_EFFORT, HIGH], {"pods": 2}, ["best-effort", "high-request"]),
    ],
)
def test_choose_victims_prefers_least_important_pods(
    others: list[Pod], missing: dict[str, int], chosen: list[str]
) -> None:
    victims = choose_victims(CRITICAL, others, missing, requests_of=requests_of, class_of=qos_class)
    assert [victim.metadata.name for victim in victims] == chosen


others_strategy = st.lists(
    st.builds(
        lambda cpu, memory, limits, priority: (cpu, memory, limits, priority),
        st.integers(0, 5),
        st.integers(0, 5),
        st.booleans(),
        st.sampled_from([None, 1, SYSTEM]),
    ),
    max_size=8,
)
missing_strategy = st.dictionaries(st.sampled_from(["cpu", "memory", "pods"]), st.integers(1, 12), max_size=3)


@given(others_strategy, missing_strategy)
def test_choose_victims_sufficient_and_all_preemptible(
    given_others: list[tuple[int, int, bool, int | None]], missing: dict[str, int]
) -> None:
    others = [
        asking(f"p{number}", limits=limits, priority=priority, cpu=f"{cpu}m", memory=str(memory))
        for number, (cpu, memory, limits, priority) in enumerate(given_others)
    ]

    def freed(pods: list[Pod]) -> dict[str, int]:
        return {name: sum({**requests_of(one), "pods": 1}.get(name, 0) for one in pods) for name in missing}

    possible = freed([one for one in others if may_preempt(CRITICAL, one)])
    enough = all(possible[name] >= amount for name, amount in missing.items())
    try:
        victims = choose_victims(CRITICAL, others, missing, requests_of=requests_of, class_of=qos_class)
    except NoPreemptionVictims:
        assert not enough
        return
    assert enough
    assert all(freed(victims)[name] >= amount for name, amount in missing.items())
    assert all(may_preempt(CRITICAL, victim) for victim in victims)
    assert len({victim.uid for victim in victims}) == len(victims)
