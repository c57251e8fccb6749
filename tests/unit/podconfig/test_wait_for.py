"""The annotation that delays a start: names, missing pods and cycles, against a brute-force search."""

import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pykubelet.api.pod import Pod
from pykubelet.podconfig.wait_for import (
    CYCLE,
    FAILED,
    MAX_NAMES,
    MISSING,
    WAIT_FOR_ANNOTATION,
    WAITING,
    Wait,
    find_wait,
    wait_for_problem,
    wait_targets,
)
from tests.unit.podconfig.making import static
from tests.unit.podconfig.workloads.making import contents, deployment, problems_of
from tests.unit.podconfig.workloads.making import job as job_document


def pod(name: str, *names: str) -> Pod:
    made = static(name)
    if names:
        made.metadata.annotations[WAIT_FOR_ANNOTATION] = ", ".join(names)
    return made


def wait_of(
    chosen: Pod, *others: Pod, ready: tuple[str, ...] = (), jobs: dict[str, tuple[str, str]] | None = None
) -> Wait | None:
    return find_wait(
        chosen,
        [chosen, *others],
        lambda found: found.metadata.name.removesuffix("-node-1") in ready,
        lambda _, name: (jobs or {}).get(name),
    )


def test_find_wait_ready_pods_by_manifest_name_node_name_and_owner() -> None:
    db = pod("db")
    for name in ("db", "db-node-1", "default/db"):
        assert wait_of(pod("app", name), db, ready=("db",)) is None
        assert wait_of(pod("app", name), db) == Wait(
            WAITING, f"waits for pod {name.rpartition('/')[2]} to be ready"
        )
    replicas = contents(deployment("web", replicas=2)).pods
    app = pod("app", "web")

    def waits(*ready: str) -> bool:
        return (
            find_wait(app, [app, *replicas], lambda found: found.metadata.name in ready, lambda *_: None)
            is not None
        )

    assert waits("web-n1")
    assert not waits("web-n1", "web-1-n1")


def test_find_wait_job_counts_when_completed_also_without_pods() -> None:
    assert wait_of(pod("app", "migrate"), jobs={"migrate": ("Complete", "CompletionsReached")}) is None
    found = wait_of(pod("app", "migrate"), jobs={"migrate": ("", "")})
    assert found is not None
    assert found.reason == WAITING


def test_find_wait_failed_job_is_named_with_reason_and_remedy() -> None:
    jobs = {"migrate": ("Failed", "BackoffLimitExceeded"), "other": ("", "")}
    assert wait_of(pod("app", "other", "migrate"), jobs=jobs) == Wait(
        FAILED, "waits for Job migrate, which failed (BackoffLimitExceeded): correct and apply it"
    )


def test_find_wait_missing_pod_has_remedy() -> None:
    found = wait_of(pod("app", "db", "prod/cache"), pod("db"), ready=("db",))
    assert found is not None
    assert found.reason == MISSING
    assert found.message.startswith(
        "waits for pod prod/cache, which this node does not have: apply the manifest"
    )


def test_find_wait_cycle_names_the_way_back() -> None:
    found = wait_of(pod("a", "b"), pod("b", "c"), pod("c", "b", "a"))
    assert found is not None
    assert found.reason == CYCLE
    assert "a-node-1 → b-node-1 → c-node-1 → a-node-1" in found.message


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("web", "names the pod itself: remove that name"),
        ("default/web", "names the pod itself"),
        ("Up", "'Up' "),
        ("a/b/c", "'a/b/c' "),
        (", ".join(f"p{index}" for index in range(MAX_NAMES + 1)), "has 21 names, but at most 20"),
    ],
)
def test_wait_for_problem_wrong_annotation_is_rejected(text: str, message: str) -> None:
    chosen = pod("web", text)
    assert message in (wait_for_problem(chosen) or "")


def test_wait_targets_empty_and_repeated_names_are_dropped() -> None:
    assert wait_targets(pod("a", "b", " ", "b", "c/d,")) == [("default", "b"), ("c", "d")]


def test_read_manifest_pod_that_waits_for_itself_is_rejected_with_path() -> None:
    written = job_document()
    written["spec"]["template"]["metadata"] = {"annotations": {WAIT_FOR_ANNOTATION: "once"}}
    (problem,) = problems_of(written)
    assert "spec.template.metadata.annotations[pykubelet.dev/wait-for]: names the pod itself" in problem


NAMES = "abcdef"
graphs = st.dictionaries(st.sampled_from(NAMES), st.lists(st.sampled_from(NAMES), max_size=4), min_size=1)


@given(graphs, st.sets(st.sampled_from(NAMES)))
def test_find_wait_any_graph_waits_unless_all_are_ready_and_finds_cycles(
    graph: dict[str, list[str]], ready: set[str]
) -> None:
    pods = {name: pod(name, *targets) for name, targets in graph.items()}

    def reaches(start: str, end: str) -> bool:
        seen, todo = set(), list(graph[start])
        while todo:
            name = todo.pop()
            if name == end:
                return True
            if name in graph and name not in seen:
                seen.add(name)
                todo += graph[name]
        return False

    for name, chosen in pods.items():
        others = [found for other, found in pods.items() if other != name]
        wait = wait_of(chosen, *others, ready=tuple(ready))
        unready = [target for target in graph[name] if target not in ready or target not in graph]
        assert (wait is None) == (not unready)
        if wait is not None:
            missing = any(target not in graph for target in graph[name])
            assert wait.reason == (CYCLE if reaches(name, name) else MISSING if missing else WAITING)


def test_find_wait_thousand_pods_in_a_chain_is_fast_and_not_recursive() -> None:
    chain = [pod(f"p{index}", f"p{index + 1}") for index in range(2000)]
    started = time.process_time()
    found = wait_of(chain[0], *chain[1:], pod("p2000"))
    assert found is not None
    assert found.reason == WAITING
    assert time.process_time() - started < 5
