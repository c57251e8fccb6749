"""The decision, as a table of situations and as a property: applying it again and again ends well."""

from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pykubelet.api.meta import from_document
from pykubelet.api.pod import Pod
from pykubelet.kuberuntime.decide import Actions, ProbeResults, decide
from pykubelet.kuberuntime.kill import containers_by_name
from pykubelet.kuberuntime.labels import container_hash
from pykubelet.kuberuntime.observed import ContainerPhase, ObservedContainer, ObservedPod, ObservedSandbox

READY = ObservedSandbox(id="sb0", ready=True, created_at=1, ips=("10.0.0.1",))
PROBE = {"exec": {"command": ["true"]}}


def pod(
    *names: str,
    init: tuple[str, ...] = (),
    sidecars: tuple[str, ...] = (),
    ephemeral: tuple[str, ...] = (),
    policy: str = "Always",
    **spec: Any,
) -> Pod:
    def container(name: str) -> dict[str, Any]:
        return {"name": name, "image": "busybox"} | ({"restartPolicy": "Always"} if name in sidecars else {})

    document = {
        "metadata": {"name": "web", "namespace": "default", "uid": "u"},
        "spec": {
            "restartPolicy": policy,
            "containers": [container(name) for name in names],
            "initContainers": [container(name) for name in init],
            "ephemeralContainers": [container(name) for name in ephemeral],
            **spec,
        },
    }
    return from_document(Pod, document)


def seen(
    of: Pod, *containers: tuple[str, ContainerPhase] | tuple[str, ContainerPhase, int], sandbox: Any = READY
) -> ObservedPod:
    """The runtime's picture: (name, phase, exit code) newest first."""
    specs = containers_by_name(of)
    made = [
        ObservedContainer(
            id=f"{entry[0]}-{len(containers) - index}",
            name=entry[0],
            phase=entry[1],
            exit_code=entry[2] if len(entry) == 3 else 0,
            created_at=len(containers) - index,
            hash=container_hash(specs[entry[0]]) if entry[0] in specs else "old",
        )
        for index, entry in enumerate(containers)
    ]
    sandboxes = sandbox if isinstance(sandbox, tuple) else (sandbox,) if sandbox else ()
    return ObservedPod(uid="u", sandboxes=sandboxes, containers=tuple(made))


def summary(actions: Actions) -> str:
    words = []
    if actions.kill_pod:
        words.append("kill-pod")
    if actions.create_sandbox:
        words.append(f"sandbox#{actions.attempt}")
    words += [f"kill:{kill.container.name}" for kill in actions.kill]
    words += [f"ephemeral:{name}" for name in actions.start_ephemeral]
    words += [f"init:{name}" for name in actions.start_init]
    words += [f"start:{name}" for name in actions.start]
    return " ".join(words)


TWO_INIT = pod("main", init=("one", "two"))
SIDE = pod("main", init=("side", "one"), sidecars=("side",))
LAST_SIDE = pod("main", init=("one", "side"), sidecars=("side",))
PROBED_SIDE = pod("main", init=("side",), sidecars=("side",))
PROBED_SIDE.spec.init_containers[0].startup_probe = (
    from_document(Pod, {"spec": {"containers": [{"name": "x", "startupProbe": PROBE}]}})
    .spec.containers[0]
    .startup_probe
)


@pytest.mark.parametrize(
    ("of", "picture", "expected"),
    [
        # sandboxes
        (pod("a", "b"), seen(pod("a", "b"), sandbox=None), "kill-pod sandbox#0 start:a start:b"),
        (
            pod("a"),
            seen(
                pod("a"),
                ("a", "exited", 1),
                sandbox=ObservedSandbox(id="s", ready=False, created_at=1, attempt=2),
            ),
            "kill-pod sandbox#3 start:a",
        ),
        (
            pod("a"),
            seen(
                pod("a"), ("a", "running"), sandbox=(READY, ObservedSandbox(id="s", ready=True, created_at=0))
            ),
            "kill-pod sandbox#1 start:a",
        ),
        (
            pod("a"),
            seen(pod("a"), ("a", "running"), sandbox=ObservedSandbox(id="s", ready=True, created_at=1)),
            "kill-pod sandbox#1 start:a",
        ),
        (
            pod("a", hostNetwork=True),
            seen(pod("a"), sandbox=ObservedSandbox(id="s", ready=True, created_at=1, host_network=True)),
            "start:a",
        ),
        (pod("a", hostNetwork=True), seen(pod("a"), ("a", "running")), "kill-pod sandbox#1 start:a"),
        (
            pod("a", policy="Never"),
            seen(pod("a"), ("a", "exited", 1), sandbox=ObservedSandbox(id="s", ready=False, created_at=1)),
            "kill-pod",
        ),
        (
            pod("a", "b", policy="OnFailure"),
            seen(
                pod("a", "b"),
                ("a", "exited", 0),
                ("b", "exited", 3),
                sandbox=ObservedSandbox(id="s", ready=False, created_at=1),
            ),
            "kill-pod sandbox#1 start:b",
        ),
        (
            pod("a", policy="OnFailure"),
            seen(pod("a"), ("a", "exited", 0), sandbox=ObservedSandbox(id="s", ready=False, created_at=1)),
            "kill-pod",
        ),
        # ordinary containers
        (pod("a", "b"), seen(pod("a", "b"), ("a", "running"), ("b", "running")), ""),
        (pod("a", "b"), seen(pod("a", "b"), ("a", "running")), "start:b"),
        (pod("a"), seen(pod("a"), ("a", "exited", 0)), "start:a"),
        (pod("a"), seen(pod("a"), ("a", "created")), "start:a"),
        (pod("a"), seen(pod("a"), ("a", "unknown")), "kill:a start:a"),
        (pod("a", policy="OnFailure"), seen(pod("a"), ("a", "exited", 0)), "kill-pod"),
        (pod("a", policy="OnFailure"), seen(pod("a"), ("a", "exited", 1)), "start:a"),
        (pod("a", policy="Never"), seen(pod("a"), ("a", "exited", 1)), "kill-pod"),
        (pod("a", "b", policy="Never"), seen(pod("a", "b"), ("a", "exited", 1), ("b", "running")), ""),
        # ephemeral containers are never restarted
        (pod("a", ephemeral=("dbg",)), seen(pod("a"), ("a", "running")), "ephemeral:dbg"),
        (
            pod("a", ephemeral=("dbg",)),
            seen(pod("a", ephemeral=("dbg",)), ("dbg", "exited", 1), ("a", "running")),
            "",
        ),
        # init containers one after the other
        (TWO_INIT, seen(TWO_INIT, sandbox=None), "kill-pod sandbox#0 init:one"),
        (TWO_INIT, seen(TWO_INIT), "init:one"),
        (TWO_INIT, seen(TWO_INIT, ("one", "running")), ""),
        (TWO_INIT, seen(TWO_INIT, ("one", "created")), "init:one"),
        (TWO_INIT, seen(TWO_INIT, ("one", "exited", 0)), "init:two"),
        (TWO_INIT, seen(TWO_INIT, ("one", "exited", 1)), "init:one"),
        (TWO_INIT, seen(TWO_INIT, ("two", "running"), ("one", "exited", 0)), ""),
        (TWO_INIT, seen(TWO_INIT, ("two", "exited", 0), ("one", "exited", 0)), "start:main"),
        (TWO_INIT, seen(TWO_INIT, ("two", "exited", 0)), "start:main"),
        (TWO_INIT, seen(TWO_INIT, ("main", "running")), ""),
        (TWO_INIT, seen(TWO_INIT, ("one", "unknown")), "kill:one init:one"),
        (
            pod("main", init=("one",), policy="Never"),
            seen(pod("main", init=("one",)), ("one", "exited", 1)),
            "kill-pod",
        ),
        # sidecars
        (SIDE, seen(SIDE), "init:side"),
        (SIDE, seen(SIDE, ("side", "running")), "init:one"),
        (SIDE, seen(SIDE, ("one", "running"), ("side", "running")), ""),
        (SIDE, seen(SIDE, ("one", "exited", 0), ("side", "running")), "start:main"),
        (SIDE, seen(SIDE, ("main", "running"), ("one", "exited", 0), ("side", "exited", 1)), "init:side"),
        (SIDE, seen(SIDE, ("main", "running"), ("one", "exited", 0)), "init:side"),
        (LAST_SIDE, seen(LAST_SIDE, ("one", "exited", 0)), "init:side"),
        (LAST_SIDE, seen(LAST_SIDE, ("side", "running"), ("one", "exited", 0)), "start:main"),
        (
            pod("main", init=("side",), sidecars=("side",), policy="Never"),
            seen(pod("main", init=("side",), sidecars=("side",)), ("main", "exited", 0), ("side", "running")),
            "kill-pod",
        ),
        (PROBED_SIDE, seen(PROBED_SIDE, ("side", "running")), ""),
    ],
)
def test_decide_observed_states_returns_actions(of: Pod, picture: ObservedPod, expected: str) -> None:
    assert summary(decide(of, picture)) == expected


def test_decide_failed_probe_or_restart_request_kills_container() -> None:
    of = pod("a")
    picture = seen(of, ("a", "running"))
    running = picture.containers[0].id
    failed_liveness = decide(of, picture, ProbeResults(liveness={running: False}))
    assert summary(failed_liveness) == "kill:a start:a"
    assert failed_liveness.kill[0].message == "Container a failed liveness probe, will be restarted"
    assert failed_liveness.kill[0].reason == "LivenessProbe"
    assert summary(decide(of, picture, ProbeResults(startup={running: False}))) == "kill:a start:a"
    assert summary(decide(of, picture, ProbeResults(liveness={running: True}))) == ""
    assert summary(decide(of, picture, None, frozenset({running}))) == "kill:a start:a"
    never = pod("a", policy="Never")
    assert summary(decide(never, picture, ProbeResults(liveness={running: False}))) == "kill-pod kill:a"
    assert summary(decide(never, picture, None, frozenset({running}))) == "kill:a start:a"


def test_decide_changed_container_hash_restarts_regardless_of_policy() -> None:
    of = pod("a", policy="Never")
    picture = seen(of, ("a", "running"))
    of.spec.containers[0].image = "busybox:2"
    actions = decide(of, picture)
    assert summary(actions) == "kill:a start:a"
    assert actions.kill[0].message == "Container a definition changed, will be restarted"


def test_decide_sidecar_startup_probe_pending_delays_app_containers() -> None:
    picture = seen(PROBED_SIDE, ("side", "running"))
    side = picture.containers[0].id
    assert summary(decide(PROBED_SIDE, picture, ProbeResults(startup={side: True}))) == "start:main"
    assert summary(decide(PROBED_SIDE, picture, ProbeResults(startup={side: False}))) == "kill:side init:side"


@pytest.mark.parametrize(("operator", "again"), [("In", True), ("NotIn", False)])
def test_decide_restart_rule_exit_code_match_restarts(operator: str, again: bool) -> None:
    of = pod("a", policy="Never")
    rule = {"action": "Restart", "exitCodes": {"operator": operator, "values": [42]}}
    document = {"spec": {"containers": [{"name": "a", "image": "busybox", "restartPolicyRules": [rule]}]}}
    of.spec.containers = from_document(Pod, document).spec.containers
    assert summary(decide(of, seen(of, ("a", "exited", 42)))) == ("start:a" if again else "kill-pod")


@dataclass
class ToyRuntime:
    """A runtime of its own mind: applies decisions, and lets containers end as a script says."""

    of: Pod
    script: dict[str, list[int | None]]
    sandboxes: list[ObservedSandbox] = field(default_factory=list)
    containers: list[ObservedContainer] = field(default_factory=list)
    clock: int = 0

    def picture(self) -> ObservedPod:
        return ObservedPod(uid="u", sandboxes=tuple(self.sandboxes), containers=tuple(self.containers))

    def apply(self, actions: Actions) -> None:
        if actions.kill_pod:
            self.containers = [self._ended(c, 137) for c in self.containers]
            self.sandboxes = [
                ObservedSandbox(id=s.id, ready=False, created_at=s.created_at, attempt=s.attempt)
                for s in self.sandboxes
            ]
            if actions.create_sandbox:
                initial = {c.name for c in self.of.spec.init_containers}
                self.containers = [c for c in self.containers if c.name not in initial]
        doomed = {kill.container.id for kill in actions.kill}
        self.containers = [self._ended(c, 137) if c.id in doomed else c for c in self.containers]
        if actions.create_sandbox:
            self.clock += 1
            fresh = ObservedSandbox(
                id=f"sb{self.clock}",
                ready=True,
                created_at=self.clock,
                attempt=actions.attempt,
                ips=("10.0.0.1",),
            )
            self.sandboxes.insert(0, fresh)
        for name in [*actions.start_ephemeral, *actions.start_init, *actions.start]:
            assert self.sandboxes, "a container without a sandbox"
            assert self.sandboxes[0].ready, "a container in a dead sandbox"
            running = [c for c in self.containers if c.name == name and c.phase == "running"]
            assert not running, f"a second {name}"
            self.clock += 1
            hash_ = container_hash(containers_by_name(self.of)[name])
            self.containers.insert(
                0,
                ObservedContainer(
                    id=f"{name}{self.clock}", name=name, phase="running", created_at=self.clock, hash=hash_
                ),
            )

    def live(self) -> bool:
        """Let each running container take its next scripted turn; False when nothing happened."""
        moved = False
        for index, container in enumerate(self.containers):
            turns = self.script.get(container.name, [])
            if container.phase == "running" and turns:
                code = turns.pop(0)
                moved = True
                if code is not None:
                    self.containers[index] = self._ended(container, code)
        return moved

    @staticmethod
    def _ended(container: ObservedContainer, code: int) -> ObservedContainer:
        if container.phase == "exited":
            return container
        return ObservedContainer(
            id=container.id,
            name=container.name,
            phase="exited",
            exit_code=code,
            created_at=container.created_at,
            hash=container.hash,
        )


turns = st.lists(st.sampled_from([None, 0, 1]), max_size=4)


@settings(max_examples=300, deadline=None)
@given(
    st.sampled_from(["Always", "OnFailure", "Never"]),
    st.lists(st.sampled_from(["init", "sidecar"]), max_size=3),
    st.integers(1, 2),
    st.data(),
)
def test_decide_applied_repeatedly_converges(
    policy: str, initial: list[str], count: int, data: st.DataObject
) -> None:
    init = tuple(f"i{index}" for index in range(len(initial)))
    sidecars = tuple(name for name, kind in zip(init, initial, strict=True) if kind == "sidecar")
    names = tuple(f"c{index}" for index in range(count))
    of = pod(*names, init=init, sidecars=sidecars, policy=policy)
    script: dict[str, list[int | None]] = {name: data.draw(turns) for name in (*names, *init)}
    for name in init:
        if name not in sidecars:
            script[name].append(0)  # an init container that runs for ever never lets a pod start
    runtime = ToyRuntime(of, script)
    for _ in range(60):
        actions = decide(of, runtime.picture())
        running_ordinary = [c.name for c in runtime.picture().running if c.name in names]
        if actions.start and not actions.create_sandbox and init:
            waiting = [n for n in init if n not in sidecars and runtime.picture().latest(n) is None]
            assert not waiting or running_ordinary, "ordinary containers before initialization is over"
        runtime.apply(actions)
        if not runtime.live() and actions.idle:
            break
        if actions.kill_pod and not actions.create_sandbox and not runtime.picture().running:
            break
    picture = runtime.picture()
    running = {container.name for container in picture.running}
    if policy == "Always":
        assert running >= set(names)
        assert running >= set(sidecars)
    else:
        for name in names:
            last = picture.latest(name)
            if name not in running and last is not None and running & set(names):
                assert policy == "Never" or last.exit_code == 0
