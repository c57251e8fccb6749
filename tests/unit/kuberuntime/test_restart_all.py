"""All containers begin anew: which ends ask for it, what goes in which order, and what follows."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pykubelet.api.meta import from_document
from pykubelet.api.pod import Pod
from pykubelet.kuberuntime.decide import (
    Actions,
    decide,
    is_reset,
    may_restart_all,
    reset_waves,
    restart_all_causes,
    restarts_after_exit,
    restarts_all,
)
from pykubelet.kuberuntime.observed import ContainerPhase, ObservedContainer, ObservedPod, ObservedSandbox

READY = ObservedSandbox(id="box", ready=True, created_at=1, ips=("10.0.0.1",))
DEAD = ObservedSandbox(id="box", ready=False, created_at=1)
ALL_ON_3 = {"action": "RestartAllContainers", "exitCodes": {"operator": "In", "values": [3]}}
ALL_BUT_0 = {"action": "RestartAllContainers", "exitCodes": {"operator": "NotIn", "values": [0]}}
ONE_ON_3 = {"action": "Restart", "exitCodes": {"operator": "In", "values": [3, 4]}}
UNHEARD_OF = {"action": "Wave", "exitCodes": {"operator": "In", "values": [3]}}

Trace = tuple[str, ContainerPhase, int]


def pod(*rules: dict[str, Any], on: str = "main", policy: str = "Never") -> Pod:
    """A pod with an init container, two sidecars and two ordinary ones, one of which has these rules."""

    def container(name: str, **fields: Any) -> dict[str, Any]:
        own = {"restartPolicyRules": list(rules)} if name == on else {}
        policy = {"restartPolicy": "Never"} if name == on else {}
        return {"name": name, "image": "busybox"} | policy | fields | own

    sidecars = [container(name, restartPolicy="Always") for name in ("near", "far")]
    spec = {
        "restartPolicy": policy,
        "initContainers": [container("first"), *sidecars],
        "containers": [container("main"), container("other")],
        "ephemeralContainers": [container("debug")],
    }
    return from_document(Pod, {"metadata": {"name": "web", "uid": "u"}, "spec": spec})


def seen(*traces: Trace, sandbox: ObservedSandbox = READY) -> ObservedPod:
    """What the runtime has, newest first; ids tell the name and how many of it came before."""
    found = []
    for index, (name, phase, code) in enumerate(traces):
        number = sum(later[0] == name for later in traces[index + 1 :])
        found.append(
            ObservedContainer(
                id=f"{name}{number}",
                name=name,
                phase=phase,
                exit_code=code,
                created_at=len(traces) - index,
                sandbox_id=sandbox.id,
            )
        )
    return ObservedPod(uid="u", sandboxes=(sandbox,), containers=tuple(found))


def ids(waves: Any) -> list[set[str]]:
    return [{container.id for container in wave} for wave in waves]


@pytest.mark.parametrize(
    ("rules", "code", "again", "everybody"),
    [
        ([], 3, False, False),
        ([ALL_ON_3], 3, True, True),
        ([ALL_ON_3], 4, False, False),
        ([ALL_BUT_0], 4, True, True),
        ([ALL_BUT_0], 0, False, False),
        # The first that fits decides, whatever the next one says.
        ([ONE_ON_3, ALL_ON_3], 3, True, False),
        ([ALL_ON_3, ONE_ON_3], 3, True, True),
        ([ALL_ON_3, ONE_ON_3], 4, True, False),
        ([UNHEARD_OF, ALL_ON_3], 3, False, False),
        ([{"action": "RestartAllContainers"}], 3, False, False),
    ],
)
@pytest.mark.parametrize("on", ["first", "main"])
def test_restart_rules_first_match_decides(
    rules: list[dict[str, Any]], code: int, again: bool, everybody: bool, on: str
) -> None:
    of = pod(*rules, on=on)
    (container,) = [c for c in (*of.spec.init_containers, *of.spec.containers) if c.name == on]
    assert restarts_after_exit(of, container, code) == again
    assert restarts_all(container, code) == everybody
    assert may_restart_all(of.spec) == any(rule["action"] == "RestartAllContainers" for rule in rules)


@pytest.mark.parametrize(
    ("on", "traces", "expected"),
    [
        ("main", [("main", "exited", 3)], [{"main0"}]),
        (
            "main",
            [
                ("debug", "running", 0),
                ("main", "exited", 3),
                ("other", "running", 0),
                ("far", "running", 0),
                ("near", "running", 0),
                ("first", "exited", 0),
            ],
            [{"other0"}, {"far0"}, {"near0"}, {"first0"}, {"main0"}],
        ),
        # A sidecar is the reason, and an older trace of one is no reason less.
        (
            "near",
            [("near", "exited", 3), ("main", "created", 0), ("main", "exited", 1), ("near", "exited", 3)],
            [{"main0", "main1"}, {"near0", "near1"}],
        ),
        # Its older end was another one.
        ("main", [("main", "exited", 3), ("main", "exited", 1)], [{"main0"}, {"main1"}]),
        ("first", [("first", "exited", 3)], [{"first0"}]),
        # Nobody is left who gave the reason: it was said before.
        ("main", [("other", "unknown", 0), ("first", "exited", 0)], [{"other0"}, {"first0"}]),
    ],
)
def test_reset_waves_causing_containers_removed_last(
    on: str, traces: list[Trace], expected: list[set[str]]
) -> None:
    of, observed = pod(ALL_ON_3, on=on), seen(*traces)
    assert ids(reset_waves(of, observed)) == expected
    for sandbox in (READY, DEAD):
        actions = decide(of, seen(*traces, sandbox=sandbox), restart_all=True)
        assert ids(actions.reset) == expected
        assert not actions.idle
        assert actions == Actions(reset=actions.reset)


def test_decide_after_reset_starts_init_in_same_sandbox() -> None:
    of = pod(ALL_ON_3)
    actions = decide(of, seen(("debug", "running", 0)))
    assert (actions.sandbox_id, actions.create_sandbox, actions.kill_pod) == ("box", False, False)
    assert (actions.start_ephemeral, actions.start_init, actions.start) == ([], ["first"], [])


def test_decide_after_reset_dead_sandbox_creates_new_sandbox() -> None:
    # What somebody looks through does not count as the pod's own end.
    actions = decide(pod(ALL_ON_3), seen(("debug", "exited", 0), sandbox=DEAD))
    assert (actions.create_sandbox, actions.start_init) == (True, ["first"])
    ended = decide(pod(ALL_ON_3), seen(("main", "exited", 0), sandbox=DEAD))
    assert (ended.create_sandbox, ended.kill_pod) == (False, True)


@pytest.mark.parametrize(
    ("traces", "reasons"),
    [
        ([("main", "exited", 3)], {"main0"}),
        ([("main", "running", 3)], set()),
        ([("main", "exited", 0)], set()),
        # Only how it ended last counts: it ran again since, with all others or alone.
        ([("main", "running", 0), ("main", "exited", 3)], set()),
        ([("other", "exited", 3)], set()),
    ],
)
def test_restart_all_causes_only_last_exit_counts(traces: list[Trace], reasons: set[str]) -> None:
    assert {container.id for container in restart_all_causes(pod(ALL_ON_3), seen(*traces))} == reasons


PHASES = st.sampled_from(["created", "running", "exited", "unknown"])
TRACES = st.lists(
    st.tuples(
        st.sampled_from(["first", "near", "far", "main", "other", "debug"]),
        PHASES,
        st.sampled_from([0, 1, 3]),
    ),
    max_size=8,
)


@given(st.sampled_from(["first", "near", "main"]), TRACES, st.integers(0, 8))
def test_reset_waves_interrupted_cause_remains_until_reset(on: str, traces: list[Trace], done: int) -> None:
    of, observed = pod(ALL_ON_3, on=on), seen((on, "exited", 3), *traces)
    order = [container for wave in reset_waves(of, observed) for container in wave]
    mine = {name for name, *_ in traces if name != "debug"} | {on}
    assert sorted(c.id for c in order) == sorted(c.id for c in observed.containers if c.name in mine)
    gone = {container.id for container in order[:done]}
    left = ObservedPod(
        uid="u", sandboxes=(READY,), containers=tuple(c for c in observed.containers if c.id not in gone)
    )
    assert is_reset(of, left) == (done >= len(order))
    assert bool(restart_all_causes(of, left)) == (not is_reset(of, left))
