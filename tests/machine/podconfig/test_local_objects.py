"""ConfigMaps and Secrets of the manifests folder, seen from inside of real containers."""

import base64
import json
from collections.abc import Iterator

import pytest

from tests.support.manifests import Document, container, pod
from tests.support.node import Node, status_of

pytestmark = pytest.mark.machine

HIDDEN = "hunter2-is-not-to-be-seen"


@pytest.fixture(autouse=True)
def tidy(node: Node) -> Iterator[None]:
    """Take the test's manifests away; the module's end proves that their pods are gone."""
    yield
    for path in node.manifests.iterdir():
        path.unlink()


def config_map(name: str, data: dict[str, str], **fields: object) -> Document:
    return {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": name}, "data": data, **fields}


def secret(name: str, data: dict[str, str], **fields: object) -> Document:
    return {"apiVersion": "v1", "kind": "Secret", "metadata": {"name": name}, "stringData": data, **fields}


def put(node: Node, document: Document) -> None:
    node.write(json.dumps(document), f"{document['metadata']['name']}.object.json")


def from_map(name: str, key: str, **more: object) -> Document:
    return {"valueFrom": {"configMapKeyRef": {"name": name, "key": key, **more}}}


def mount(name: str) -> Document:
    return {"name": name, "mountPath": f"/{name}"}


def test_config_map_and_secret_volumes_updated_live_env_read_once(node: Node) -> None:
    put(
        node,
        config_map(
            "app", {"color": "red", "size": "big"}, binaryData={"raw": base64.b64encode(b"\0\1").decode()}
        ),
    )
    put(node, secret("login", {"password": HIDDEN}))
    main = container(
        env=[
            {"name": "COLOR", **from_map("app", "color")},
            {"name": "NONE", **from_map("no", "x", optional=True)},
        ],
        envFrom=[{"secretRef": {"name": "login"}, "prefix": "LOGIN_"}, {"configMapRef": {"name": "app"}}],
        volumeMounts=[mount("config"), mount("hidden"), mount("both"), mount("absent")],
    )
    sources = [{"configMap": {"name": "app"}}, {"secret": {"name": "login"}}]
    volumes = [
        {"name": "config", "configMap": {"name": "app", "items": [{"key": "color", "path": "a/color"}]}},
        {"name": "hidden", "secret": {"secretName": "login", "defaultMode": 0o400}},
        {"name": "both", "projected": {"sources": sources}},
        {"name": "absent", "configMap": {"name": "no", "optional": True}},
    ]
    started = node.start_pod(pod("user", main, volumes=volumes))
    assert (
        node.shell("user-n1", "echo $COLOR $size $LOGIN_password ${NONE-unset}")
        == f"red big {HIDDEN} unset\n"
    )
    assert node.shell("user-n1", "cat /config/a/color; ls /config /absent") == "red/absent:\n\n/config:\na\n"
    assert node.shell("user-n1", "stat -L -c %a /hidden/password; cat /hidden/password") == f"400\n{HIDDEN}"
    assert node.shell("user-n1", "ls /both; od -An -tx1 /both/raw") == "color\npassword\nraw\nsize\n 00 01\n"

    put(node, config_map("app", {"color": "blue"}))
    put(node, secret("login", {"password": "changed"}))
    put(node, config_map("no", {"now": "there"}))

    def gives(command: str, text: str) -> bool:
        """Whether a command gives this; it may fail before, and while files are exchanged."""
        return node.shell("user-n1", f"{command} 2>/dev/null || true") == text

    node.wait("the configMap to change", lambda: gives("cat /config/a/color", "blue"))
    node.wait("the secret to change", lambda: gives("cat /hidden/password", "changed"))
    node.wait("both to change", lambda: gives("ls /both", "color\npassword\n"))
    node.wait("the missing one to come", lambda: gives("cat /absent/*", "there"))
    assert node.shell("user-n1", "echo $COLOR") == "red\n", "variables are read once"
    now = node.pod("user-n1")
    assert now is not None
    assert now["metadata"]["uid"] == started["metadata"]["uid"]
    assert status_of(now, "main")["restartCount"] == 0
    assert HIDDEN not in node.log_text()
    assert HIDDEN not in json.dumps(node.pods())


def test_config_map_volume_missing_pod_starts_once_created(node: Node) -> None:
    volumes = [{"name": "v", "configMap": {"name": "late", "items": [{"key": "k", "path": "k"}]}}]
    name = node.write(pod("waiting", container(volumeMounts=[mount("v")]), volumes=volumes))
    told = node.wait_event(name, "FailedMount")
    assert told == 'MountVolume.SetUp failed for volume "v" : configmap "late" not found'
    put(node, config_map("late", {"other": "x"}))
    without_key = 'MountVolume.SetUp failed for volume "v" : configmap references non-existent config key: k'
    node.wait("the missing key to be told", lambda: without_key in [m for _, m, _ in node.events(name)])
    put(node, config_map("late", {"k": "there"}))
    node.wait_ready(name)
    assert node.shell(name, "cat /v/k") == "there"


def test_config_map_env_missing_waits_with_upstream_message(node: Node) -> None:
    env = [{"name": "A", **from_map("vars", "a")}]
    name = node.write(pod("variable", container(env=env)))

    def waiting_for(message: str) -> None:
        def fits(found: Document) -> bool:
            waiting = status_of(found, "main")["state"].get("waiting", {})
            return (waiting.get("reason"), waiting.get("message")) == ("CreateContainerConfigError", message)

        node.wait_pod(name, f"to wait: {message}", fits, 40)

    waiting_for('configmap "vars" not found')
    put(node, config_map("vars", {"b": "x"}))
    waiting_for("couldn't find key a in ConfigMap default/vars")
    put(node, config_map("vars", {"a": "found"}))
    node.wait_ready(name, 40)
    assert node.shell(name, "echo $A") == "found\n"


def test_local_object_invalid_is_logged_and_pods_unaffected(node: Node) -> None:
    put(node, config_map("good", {"k": "one"}, immutable=True))
    volumes = [{"name": "v", "configMap": {"name": "good"}}]
    node.start_pod(pod("steady", container(volumeMounts=[mount("v")]), volumes=volumes))
    bad = {**secret("bad", {}), "data": {"password": HIDDEN}}
    put(node, bad)
    node.wait(
        "the bad one to be told", lambda: "Secret 'bad': data.password: is not base64" in node.log_text()
    )
    put(node, config_map("good", {"k": "two"}))
    node.wait("the change to be told", lambda: "is immutable and has changed" in node.log_text())
    assert node.shell("steady-n1", "cat /v/k") == "one"
    remedy = f"chmod 600 {node.manifests}/hidden.object.json"
    put(node, secret("hidden", {"password": HIDDEN}))
    node.wait("the warning", lambda: remedy in node.log_text())
    assert HIDDEN not in node.log_text()
