"""The words of `ps`, and which pod a person means, as tables."""

from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pykubelet.api.meta import from_document
from pykubelet.api.pod import Pod
from pykubelet.cli.client import SelectionError, choose_container, choose_pod, manifest_name
from pykubelet.cli.printers import format_duration, pod_creation_time, pod_row, restarts, status_text
from tests.support.pod_view import START, pod_of

RUN = {"running": {"startedAt": "2026-01-02T03:04:06Z"}}
READY = [{"type": "Initialized", "status": "True"}, {"type": "Ready", "status": "True"}]
INITIALIZED = [{"type": "Initialized", "status": "True"}, {"type": "Ready", "status": "False"}]
STARTING = [{"type": "Initialized", "status": "False"}, {"type": "Ready", "status": "False"}]


def waiting(reason: str) -> dict[str, Any]:
    return {"waiting": {"reason": reason}}


def ended(code: int, reason: str = "", signal: int = 0) -> dict[str, Any]:
    said = (
        {"exitCode": code} | ({"reason": reason} if reason else {}) | ({"signal": signal} if signal else {})
    )
    return {"terminated": said}


def status(name: str, state: dict[str, Any], *, ready: bool = False, **more: Any) -> dict[str, Any]:
    return {"name": name, "state": state, "ready": ready, "restartCount": more.pop("restarts", 0), **more}


def pod(
    containers: list[dict[str, Any]],
    *,
    init: list[dict[str, Any]] | None = None,
    sidecars: tuple[str, ...] = (),
    conditions: list[dict[str, str]] | None = None,
    phase: str = "Running",
    reason: str = "",
    deleted: bool = False,
) -> Pod:
    init = init or []
    return from_document(
        Pod,
        {
            "metadata": {"name": "p"} | ({"deletionTimestamp": "2026-01-02T03:04:05Z"} if deleted else {}),
            "spec": {
                "containers": [{"name": c["name"]} for c in containers],
                "initContainers": [
                    {"name": c["name"]} | ({"restartPolicy": "Always"} if c["name"] in sidecars else {})
                    for c in init
                ],
            },
            "status": {
                "phase": phase,
                "reason": reason,
                "conditions": conditions if conditions is not None else READY,
                "containerStatuses": containers,
                "initContainerStatuses": init,
            },
        },
    )


CREATING = waiting("PodInitializing")
TABLE = {
    "just accepted": (pod([], phase="Pending"), "Pending", "0/0"),
    "creating": (
        pod([status("a", waiting("ContainerCreating"))], phase="Pending", conditions=INITIALIZED),
        "ContainerCreating",
        "0/1",
    ),
    "running and ready": (pod([status("a", RUN, ready=True)]), "Running", "1/1"),
    "running, one not ready": (
        pod([status("a", RUN, ready=True), status("b", RUN)], conditions=INITIALIZED),
        "Running",
        "1/2",
    ),
    "crashing": (pod([status("a", waiting("CrashLoopBackOff"))]), "CrashLoopBackOff", "0/1"),
    "the first that waits speaks": (
        pod([status("a", waiting("ErrImagePull")), status("b", waiting("CrashLoopBackOff"))]),
        "ErrImagePull",
        "0/2",
    ),
    "completed": (
        pod([status("a", ended(0, "Completed"))], phase="Succeeded", conditions=INITIALIZED),
        "Completed",
        "0/1",
    ),
    "failed": (
        pod([status("a", ended(3, "Error"))], phase="Failed", conditions=INITIALIZED),
        "Error",
        "0/1",
    ),
    "killed for memory": (pod([status("a", ended(137, "OOMKilled"))]), "OOMKilled", "0/1"),
    "ended by a signal": (pod([status("a", ended(0, signal=9))]), "Signal:9", "0/1"),
    "ended without a reason": (pod([status("a", ended(7))]), "ExitCode:7", "0/1"),
    "one completed, one runs, ready": (
        pod([status("a", ended(0, "Completed")), status("b", RUN, ready=True)]),
        "Running",
        "1/2",
    ),
    "one completed, one runs, pod not ready": (
        pod([status("a", ended(0, "Completed")), status("b", RUN, ready=True)], conditions=INITIALIZED),
        "NotReady",
        "1/2",
    ),
    "one completed, one failed": (
        pod(
            [status("a", ended(0, "Completed")), status("b", ended(1, "Error"))],
            phase="Failed",
            conditions=INITIALIZED,
        ),
        "Error",
        "0/2",
    ),
    "init has begun": (
        pod(
            [status("a", CREATING)],
            init=[status("i", RUN), status("j", CREATING)],
            phase="Pending",
            conditions=STARTING,
        ),
        "Init:0/2",
        "0/1",
    ),
    "second init": (
        pod(
            [status("a", CREATING)],
            init=[status("i", ended(0, "Completed")), status("j", RUN)],
            phase="Pending",
            conditions=STARTING,
        ),
        "Init:1/2",
        "0/1",
    ),
    "init failed": (
        pod(
            [status("a", CREATING)],
            init=[status("i", ended(1, "Error"))],
            phase="Failed",
            conditions=STARTING,
        ),
        "Init:Error",
        "0/1",
    ),
    "init ended without a reason": (
        pod([status("a", CREATING)], init=[status("i", ended(4))], phase="Pending", conditions=STARTING),
        "Init:ExitCode:4",
        "0/1",
    ),
    "init crashing": (
        pod(
            [status("a", CREATING)],
            init=[status("i", waiting("CrashLoopBackOff"))],
            phase="Pending",
            conditions=STARTING,
        ),
        "Init:CrashLoopBackOff",
        "0/1",
    ),
    "sidecar started, next init runs": (
        pod(
            [status("a", CREATING)],
            init=[status("s", RUN, ready=True, started=True), status("j", RUN)],
            sidecars=("s",),
            phase="Pending",
            conditions=STARTING,
        ),
        "Init:1/2",
        "1/2",
    ),
    "sidecar not started yet": (
        pod(
            [status("a", CREATING)],
            init=[status("s", RUN, started=False)],
            sidecars=("s",),
            phase="Pending",
            conditions=STARTING,
        ),
        "Init:0/1",
        "0/2",
    ),
    "sidecar and main ready": (
        pod(
            [status("a", RUN, ready=True)],
            init=[status("s", RUN, ready=True, started=True)],
            sidecars=("s",),
        ),
        "Running",
        "2/2",
    ),
    "refused": (
        pod([], phase="Failed", reason="OutOfcpu", conditions=[]),
        "OutOfcpu",
        "0/0",
    ),
    "deleted": (pod([status("a", RUN, ready=True)], deleted=True), "Terminating", "1/1"),
    "deleted and finished": (
        pod([status("a", ended(0, "Completed"))], phase="Succeeded", deleted=True, conditions=INITIALIZED),
        "Completed",
        "0/1",
    ),
}


@pytest.mark.parametrize(("given_pod", "word", "ready"), TABLE.values(), ids=TABLE.keys())
def test_pod_row_status_and_ready_columns(given_pod: Pod, word: str, ready: str) -> None:
    shown = pod_row(given_pod, "syncing", START)
    assert (shown.status, shown.ready) == (word, ready)


def test_status_text_static_pod_terminating() -> None:
    assert status_text(pod([status("a", RUN, ready=True)]), "terminating") == "Terminating"
    done = pod([status("a", ended(0, "Completed"))], phase="Succeeded", conditions=INITIALIZED)
    assert status_text(done, "terminated") == "Completed"


def test_restarts_column_includes_time_of_last_restart() -> None:
    last = {"terminated": {"exitCode": 1, "finishedAt": "2026-01-02T03:04:05Z"}}
    crashed = pod([status("a", RUN, ready=True, restarts=2, lastState=last), status("b", RUN, restarts=1)])
    assert restarts(crashed, START + timedelta(minutes=5)) == "3 (5m ago)"
    assert restarts(pod([status("a", RUN, restarts=2)]), START) == "2"
    assert restarts(pod([]), START) == "0"


def test_restarts_column_init_containers_counted_only_while_initializing() -> None:
    init = [status("i", waiting("CrashLoopBackOff"), restarts=4)]
    assert (
        restarts(pod([status("a", CREATING)], init=init, phase="Pending", conditions=STARTING), START) == "4"
    )
    done = [status("i", ended(0, "Completed"), restarts=4)]
    assert restarts(pod([status("a", RUN, restarts=1)], init=done), START) == "1"


def test_pod_row_name_namespace_ip_and_age() -> None:
    shown = pod_row(
        pod_of("web", "u", status={"podIP": "10.1.0.7"}), "syncing", START + timedelta(seconds=90)
    )
    assert (shown.name, shown.namespace, shown.ip, shown.age) == ("web-node1", "default", "10.1.0.7", "90s")
    assert pod_row(pod_of("web", "u"), "syncing", START).ip == "<none>"


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (-5, "<invalid>"),
        (-1, "0s"),
        (0, "0s"),
        (119.9, "119s"),
        (120, "2m"),
        (125, "2m5s"),
        (599, "9m59s"),
        (600, "10m"),
        (3 * 3600 - 1, "179m"),
        (3 * 3600, "3h"),
        (3 * 3600 + 300, "3h5m"),
        (8 * 3600 + 300, "8h"),
        (47.9 * 3600, "47h"),
        (48 * 3600, "2d"),
        (50 * 3600, "2d2h"),
        (8 * 86400 + 7200, "8d"),
        (2 * 365 * 86400 - 1, "729d"),
        (2 * 365 * 86400, "2y"),
        (3 * 365 * 86400 + 86400, "3y1d"),
        (9 * 365 * 86400 + 86400, "9y"),
    ],
)
def test_format_duration_matches_kubectl(seconds: float, text: str) -> None:
    assert format_duration(seconds) == text


@given(st.floats(-1e3, 1e10))
def test_format_duration_any_value_is_short(seconds: float) -> None:
    assert 2 <= len(format_duration(seconds)) <= 9


@pytest.mark.parametrize(
    ("metadata", "status", "birth"),
    [
        ({"creationTimestamp": "2026-01-02T03:00:00Z"}, {}, datetime(2026, 1, 2, 3, tzinfo=UTC)),
        ({}, {}, START),
        (
            {"annotations": {"kubernetes.io/config.seen": "2026-01-02T05:04:05.123456789+02:00"}},
            {"startTime": None},
            START.replace(microsecond=123456),
        ),
        (
            {"annotations": {"kubernetes.io/config.seen": "2026-01-02T03:04:05.000000000Z"}},
            {"startTime": None},
            START,
        ),
        ({"annotations": {"kubernetes.io/config.seen": "yesterday"}}, {"startTime": None}, None),
        ({"annotations": {}}, {"startTime": None}, None),
    ],
)
def test_pod_creation_time_from_metadata_or_status(
    metadata: dict[str, Any], status: dict[str, Any], birth: datetime | None
) -> None:
    assert pod_creation_time(pod_of("a", "u", metadata=metadata, status=status)) == birth


PODS = [
    pod_of("web", "aaaa1111"),
    pod_of("web", "bbbb2222", namespace="other"),
    pod_of("db", "aaaa3333"),
    pod_of("deadbeef", "cccc4444"),
    pod_of("api", "deadbeef5555", node="", metadata={"annotations": {}}),
]


@pytest.mark.parametrize(
    ("text", "uid"),
    [
        ("db", "aaaa3333"),
        ("db-node1", "aaaa3333"),
        ("default/db", "aaaa3333"),
        ("default/web", "aaaa1111"),
        ("other/web-node1", "bbbb2222"),
        ("aaaa1", "aaaa1111"),
        ("bbbb", "bbbb2222"),
        ("other/bbbb", "bbbb2222"),
        ("deadbeef", "cccc4444"),
        ("pod/db", "aaaa3333"),
        ("pod/other/web-node1", "bbbb2222"),
        ("pod/default/web", "aaaa1111"),
        ("deadbeef5", "deadbeef5555"),
        ("api", "deadbeef5555"),
    ],
)
def test_choose_pod_by_name_namespace_or_uid(text: str, uid: str) -> None:
    assert choose_pod(PODS, text).uid == uid


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("web", ["may be any of these", "default/web-node1", "other/web-node1"]),
        ("aaaa", ["may be any of these", "aaaa1111", "aaaa3333"]),
        ("nope", ["there is no pod 'nope'", "default/db-node1"]),
        ("bbb", ["there is no pod"]),
        ("default/bbbb", ["there is no pod"]),
        ("/web", ["there is no pod"]),
        ("", ["there is no pod"]),
    ],
)
def test_choose_pod_no_or_ambiguous_match_error_lists_candidates(text: str, says: list[str]) -> None:
    with pytest.raises(SelectionError) as caught:
        choose_pod(PODS, text)
    for part in says:
        assert part in str(caught.value)


def test_choose_pod_in_namespace_pod_comes_first() -> None:
    pods = [pod_of("web", "u1"), pod_of("web", "u2", namespace="pod")]
    assert choose_pod(pods, "pod/web").uid == "u2"
    assert choose_pod(pods, "pod/default/web").uid == "u1"


def test_choose_pod_many_candidates_list_truncated() -> None:
    with pytest.raises(SelectionError, match="and 40 more"):
        choose_pod([pod_of(f"p{n}", f"u{n}") for n in range(50)], "x")
    with pytest.raises(SelectionError, match="no pods at all"):
        choose_pod([], "x")


def test_choose_pod_same_name_prefers_pod_not_terminating() -> None:
    old, new = pod_of("web", "old1"), pod_of("web", "new1")
    assert choose_pod([old, new], "web", {"old1": "terminating", "new1": "syncing"}) is new
    assert choose_pod([new, old], "web", {"old1": "terminating", "new1": "syncing"}) is new
    assert choose_pod([old], "web", {"old1": "terminating"}) is old


def test_manifest_name_without_node_suffix() -> None:
    assert [manifest_name(one) for one in PODS] == ["web", "web", "db", "deadbeef", "api"]


def test_choose_container_explicit_annotated_or_first() -> None:
    two = pod_of(
        "p", "u", spec={"containers": [{"name": "a"}, {"name": "b"}], "initContainers": [{"name": "i"}]}
    )
    container, guessed = choose_container(two, None)
    assert (container.name, guessed) == ("a", True)
    assert choose_container(two, "i")[0].name == "i"
    with pytest.raises(SelectionError, match="it has: a, b, i"):
        choose_container(two, "c")
    two.metadata.annotations["kubectl.kubernetes.io/default-container"] = "b"
    assert choose_container(two, None)[0].name == "b"
    container, guessed = choose_container(PODS[0], None)
    assert (container.name, guessed) == ("main", False)
