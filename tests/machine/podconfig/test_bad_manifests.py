"""Manifests that are half-written, replaced, invalid, huge or hostile: the others never notice."""

import json
import os
import re
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from pykubelet.podconfig.file_source import SETTLED_SECONDS
from tests.support.files import below
from tests.support.manifests import Document, container, pod
from tests.support.node import Node, is_ready

pytestmark = pytest.mark.machine


@pytest.fixture(scope="module")
def witness(node: Node) -> str:
    """A pod that has nothing to do with any of it; gives its container's id."""
    node.start_pod(pod("witness"))
    (found,) = node.truth.running("witness-n1")
    return found.id


@pytest.fixture(autouse=True)
def unaffected(node: Node, witness: str) -> Iterator[None]:
    """After each bad manifest the other pod is as it was, and the node still takes good ones."""
    yield
    assert [one.id for one in node.truth.running("witness-n1")] == [witness]
    for path in node.manifests.iterdir():
        if path.name != "witness.json":
            path.unlink()
    node.start_pod(pod("after"))
    node.remove("after")
    assert is_ready(node.wait_ready("witness-n1"))
    node.wait(
        "only the witness to be left",
        lambda: [it["metadata"]["name"] for it in node.pods()] == ["witness-n1"],
    )


def told_since(node: Node, act: Callable[[], object], *words: str) -> str:
    """Do something and wait for one line of the log that has these words; gives it."""
    before = len(node.log_text())
    act()

    def line() -> str | None:
        lines = node.log_text()[before:].splitlines()
        return next((text for text in lines if all(word in text for word in words)), None)

    return node.wait(f"a line with {words}", line)


def test_manifest_half_written_is_not_applied(node: Node) -> None:
    text = yaml.safe_dump(pod("halves", container("one"), container("two")))
    middle = text.index("  - command", text.index("  - command") + 1)
    path = node.manifests / "halves.yaml"
    for _ in range(10):
        with path.open("w") as file:
            began = time.monotonic()
            # The first half is a whole pod by itself: one with only one of its containers.
            file.write(text[:middle])
            file.flush()
            time.sleep(0.5)
            early = node.pod("halves-n1")
            file.write(text[middle:])
        if time.monotonic() - began < SETTLED_SECONDS:
            assert early is None
            break
        # On a busy machine we were too slow: a file that nobody writes to for so long is taken as it is.
        path.unlink()
        node.wait(
            "half a pod to be gone",
            lambda: node.pod("halves-n1") is None and not node.truth.sandboxes("halves-n1"),
        )
    else:
        pytest.fail("this machine is too busy to write a file in two halves")
    found = node.wait_ready("halves-n1")
    assert len(found["status"]["containerStatuses"]) == 2
    assert {box.metadata.attempt for box in node.truth.sandboxes("halves-n1")} == {0}


def test_manifest_replaced_repeatedly_runs_newest_version(node: Node) -> None:
    for number in range(6):
        node.write(pod("hasty", container(env=[{"name": "NUMBER", "value": str(number)}])))
        time.sleep(0.12)

    def newest() -> bool:
        running = node.truth.running("hasty-n1")
        # An older one may end meanwhile.
        return len(running) == 1 and node.truth.exec(running[0].id, "sh", "-c", "echo $NUMBER") == (0, "5\n")

    node.wait("the newest version alone to run", newest)
    node.wait("its sandbox alone to be left", lambda: len(node.truth.ready("hasty-n1")) == 1)
    assert newest()


def test_manifest_invalid_edit_keeps_running_pod(node: Node) -> None:
    node.start_pod(pod("careful"))
    (before,) = node.truth.running("careful-n1")
    wrong = pod("careful", container(imagePullPolicy="Sometimes"))
    line = told_since(node, lambda: node.write(wrong), "careful.json", "imagePullPolicy")
    assert line.startswith("E")
    time.sleep(1)
    assert [one.id for one in node.truth.running("careful-n1")] == [before.id]
    assert node.log_text().count("imagePullPolicy") == 1, "it is said once"


HEAD = "kind: Pod\napiVersion: v1\nmetadata: {name: x}\n"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("kind: Pod\napiVersion: v1\nmetadata: {name: [}", ["YAML"]),
        ("{\"kind\": \"Pod\"", ["JSON"]),
        ("just a text", ["mapping"]),
        ("kind: Service\napiVersion: v1\n", ["Service", "hostPort"]),
        ("kind: Deployment\napiVersion: apps/v1\n", ["metadata.name"]),
        (HEAD + "spec: {containers: [{name: 7}]}", ["containers", "name"]),
        (HEAD + "spec: {}", ["spec.containers"]),
        ("\x00\x01", ["bad.yaml"]),
    ],
)  # fmt: skip
def test_manifest_not_pod_logs_one_line(node: Node, text: str, words: list[str]) -> None:
    told_since(node, lambda: node.write(text, "bad.yaml"), "bad.yaml", *words)
    assert node.pod("x-n1") is None


def test_manifest_over_10_mib_is_rejected(node: Node) -> None:
    huge = pod("huge", meta={"annotations": {"big": "x" * (10 << 20)}})
    told_since(node, lambda: node.write(huge), "huge.json", "larger than 10 MiB")
    assert node.pod("huge-n1") is None


@pytest.mark.parametrize("form", ["json", "yaml"])
def test_manifest_just_below_size_limit_keeps_kubelet_responsive(node: Node, form: str) -> None:
    """It may be run or refused, but nobody else waits for it."""
    variables = [{"name": f"VARIABLE_{number}", "value": "x" * 40} for number in range(110_000)]
    name, file = f"large-{form}", f"large.{form}"
    if form == "json":
        text = json.dumps(pod(name, container(env=variables)))
    else:
        # Not by the library, which would take half a minute.
        lines = "".join(f"    - name: {it['name']}\n      value: {it['value']}\n" for it in variables)
        text = yaml.safe_dump(pod(name, container(env=[]))).replace("    env: []\n", "    env:\n" + lines)
    assert 7 << 20 < len(text) < 10 << 20
    told_since(node, lambda: node.write(text, file), "Reading manifest", file)
    slowest, began = 0.0, time.monotonic()

    def is_read() -> bool:
        log = node.log_text()
        return f"default/{name}-n1" in log or bool(re.search(f"Failed to use manifest.*{file}", log))

    while not is_read():
        asked = time.monotonic()
        assert node.is_healthy()
        slowest = max(slowest, time.monotonic() - asked)
        assert time.monotonic() - began < 120
    print(f"\nread after {time.monotonic() - began:.1f} s, the slowest answer meanwhile took {slowest:.2f} s")
    # On a busy machine; reading it takes far longer.
    assert slowest < 7, f"the agent did not answer for {slowest:.1f} s"


BOMB = "\n".join(
    ["apiVersion: v1", "kind: Pod", "metadata: {name: bomb}", "a0: &a0 [x,x,x,x,x,x,x,x,x,x]"]
    + [f"a{n}: &a{n} [{','.join([f'*a{n - 1}'] * 10)}]" for n in range(1, 12)]
    + ["spec: {containers: [{name: main, image: x, args: *a11}]}"]
)
DEEP = "apiVersion: v1\nkind: Pod\nmetadata: {name: deep}\nspec: " + "[" * 100_000


@pytest.mark.parametrize(("text", "name"), [(BOMB, "bomb"), (DEEP, "deep"), ("[" * 200_000, "brackets")])
def test_manifest_alias_bomb_or_deep_nesting_is_rejected(node: Node, text: str, name: str) -> None:
    began = time.monotonic()
    told_since(node, lambda: node.write(text, f"{name}.yaml"), f"{name}.yaml")
    assert time.monotonic() - began < 30
    assert node.is_healthy()
    assert node.pod(f"{name}-n1") is None


def with_(**changes: Any) -> Document:
    document = pod("hostile")
    document["metadata"].update(changes.pop("meta", {}))
    document["spec"].update(changes)
    return document


ESCAPES: list[tuple[str, Document]] = [
    ("metadata.name", with_(meta={"name": "../../escape"})),
    ("metadata.name", with_(meta={"name": "a/b"})),
    ("metadata.name", with_(meta={"name": ".."})),
    ("metadata.namespace", with_(meta={"namespace": "../../escape"})),
    ("metadata.uid", with_(meta={"uid": "../../../escape"})),
    ("metadata.uid", with_(meta={"uid": ".."})),
    ("spec.containers[0].name", with_(containers=[container("../../escape")])),
    ("spec.volumes[0].name", with_(volumes=[{"name": "../../escape", "emptyDir": {}}])),
    (
        "subPath",
        with_(
            containers=[container(volumeMounts=[{"name": "v", "mountPath": "/v", "subPath": "../escape"}])],
            volumes=[{"name": "v", "emptyDir": {}}],
        ),
    ),
    ("hostname", with_(hostname="../../escape")),
    ("metadata.labels", with_(meta={"labels": {"../x": "y"}})),
]  # fmt: skip


@pytest.mark.parametrize(("words", "document"), ESCAPES)
def test_manifest_path_traversal_names_are_rejected(node: Node, words: str, document: Document) -> None:
    told_since(node, lambda: node.write(json.dumps(document), "hostile.json"), "hostile.json", words)
    assert not [path for path in below(node.instance.data_dir.parent) if "escape" in path.name]
    assert not Path("/escape").exists()


def test_subpath_symlink_in_volume_does_not_reach_host(node: Node, tmp_path: Path) -> None:
    """A container may put a link where another one's subPath will look: it must not reach the host."""
    (tmp_path / "secret").write_text("secret")
    first = container(
        "first", ["sh", "-c", f"ln -s {tmp_path} /v/inner"], volumeMounts=[{"name": "v", "mountPath": "/v"}]
    )
    main = container(volumeMounts=[{"name": "v", "mountPath": "/w", "subPath": "inner"}])
    node.write(pod("sneaky", main, initContainers=[first], volumes=[{"name": "v", "emptyDir": {}}]))
    node.wait_event("sneaky-n1", "Failed")
    assert not [one for one in node.truth.containers("sneaky-n1") if one.metadata.name == "main"]
    assert (tmp_path / "secret").read_text() == "secret"


def test_manifest_hidden_files_fifos_and_device_links_are_ignored(node: Node) -> None:
    (node.manifests / ".hidden.json").write_text(json.dumps(pod("hidden")))
    os.mkfifo(node.manifests / "pipe.yaml")
    (node.manifests / "link.yaml").symlink_to("/dev/zero")
    node.start_pod(pod("beside"))
    assert node.pod("hidden-n1") is None
