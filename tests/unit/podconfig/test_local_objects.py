"""The objects of a standalone node: what pods get, and whom a change is told."""

import base64
import json

import pytest

from pykubelet.api.core import ConfigMap, Secret
from pykubelet.api.meta import ObjectMeta
from pykubelet.api.pod import Pod
from pykubelet.images.credentials import pull_secrets, secrets_keyring
from pykubelet.objects.base import ObjectError, ObjectNotFound, PodObjects
from pykubelet.podconfig.local_objects import LocalObject, LocalObjects
from pykubelet.podconfig.manifests import read_manifest
from pykubelet.podconfig.pod_history import PodHistory
from tests.unit.podconfig.making import static

Given = list[tuple[str, LocalObject]]


def config_map(
    name: str = "c", value: str = "1", namespace: str = "default", immutable: bool | None = None
) -> ConfigMap:
    return ConfigMap(
        metadata=ObjectMeta(name=name, namespace=namespace), data={"key": value}, immutable=immutable
    )


def secret(name: str = "s", value: bytes = b"1") -> Secret:
    return Secret(metadata=ObjectMeta(name=name, namespace="default"), data={"key": value})


def user(name: str, *, volume: str = "", env: str = "", secret_env: str = "", pull: str = "") -> Pod:
    container = {"name": "main", "image": "i"}
    sources = [{"configMapRef": {"name": env}}] * bool(env) + [{"secretRef": {"name": secret_env}}] * bool(
        secret_env
    )
    return static(
        name,
        containers=[container | {"envFrom": sources}],
        volumes=[{"name": "v", "configMap": {"name": volume}}] if volume else [],
        imagePullSecrets=[{"name": pull}] if pull else [],
    )


@pytest.fixture
def objects() -> LocalObjects:
    return LocalObjects()


@pytest.fixture
def told(objects: LocalObjects) -> list[str]:
    heard: list[str] = []
    objects.add_listener(heard.append)
    return heard


def test_local_objects_satisfies_pod_objects_protocol(objects: LocalObjects) -> None:
    asked: PodObjects = objects
    assert asked is objects


async def test_local_objects_returns_objects_of_pod_namespace(objects: LocalObjects) -> None:
    pod = static()
    assert (
        objects.offer([("/m/a", config_map()), ("/m/a", secret()), ("/m/a", config_map("o", "2", "other"))])
        == []
    )
    assert (await objects.config_map(pod, "c")).data == {"key": "1"}
    assert (await objects.secret(pod, "s")).data == {"key": b"1"}
    with pytest.raises(ObjectNotFound, match=r'^configmap "o" not found$'):
        await objects.config_map(pod, "o")
    with pytest.raises(ObjectNotFound, match=r'^secret "c" not found$'):
        await objects.secret(pod, "c")
    pod.metadata.namespace = "other"
    assert (await objects.config_map(pod, "o")).data == {"key": "2"}


async def test_local_objects_before_first_offer_raises_error_other_than_not_found(
    objects: LocalObjects,
) -> None:
    with pytest.raises(ObjectError) as err:
        await objects.config_map(static(), "c")
    assert not isinstance(err.value, ObjectNotFound)
    objects.offer([])
    with pytest.raises(ObjectNotFound):
        await objects.config_map(static(), "c")


async def test_local_objects_token_or_trust_bundle_raises_object_error(objects: LocalObjects) -> None:
    pod = static()
    pod.spec.service_account_name = "robot"
    with pytest.raises(
        ObjectError, match="token of service account default/robot: this node has no API server"
    ):
        await objects.token(pod, audience="", seconds=3600)
    with pytest.raises(ObjectError, match="clusterTrustBundle roots: this node has no API server"):
        await objects.trust_bundle(pod, name="roots")


def test_local_objects_changed_notifies_only_referencing_pods(objects: LocalObjects, told: list[str]) -> None:
    by_volume, by_env = user("v", volume="c"), user("e", env="c")
    hidden, pulling, other = user("s", secret_env="s"), user("p", pull="s"), user("o", volume="other")
    for pod in (by_volume, by_env, hidden, pulling, other):
        objects.register(pod)
    first: Given = [("/m/a", config_map()), ("/m/a", secret())]
    objects.offer(first)
    assert set(told) == {pod.uid for pod in (by_volume, by_env, hidden, pulling)}
    told.clear()
    objects.offer(list(first))
    assert told == []
    objects.offer([("/m/b", config_map(value="2")), ("/m/a", secret())])
    assert set(told) == {by_volume.uid, by_env.uid}
    told.clear()
    objects.unregister(by_env.uid)
    objects.offer([])
    assert set(told) == {by_volume.uid, hidden.uid, pulling.uid}
    told.clear()
    objects.register(user("v", volume="other"))
    objects.unregister("nobody")
    objects.offer([("/m/a", config_map("other"))])
    assert len(told) == 2


async def test_local_objects_duplicate_name_uses_first_file(objects: LocalObjects) -> None:
    given: Given = [
        ("/m/a", config_map()),
        ("/m/a", config_map(value="2")),
        ("/m/b", config_map(value="3")),
        ("/m/b", secret("c")),
    ]
    assert [str(problem) for problem in objects.offer(given)] == [
        "/m/a: configMap default/c is already here: rename one, or remove it",
        "/m/b: configMap default/c is already in /m/a: rename one, or remove it",
    ]
    assert (await objects.config_map(static(), "c")).data == {"key": "1"}
    assert objects.offer(given[2:]) == []
    assert (await objects.config_map(static(), "c")).data == {"key": "3"}


async def test_local_objects_immutable_change_ignored_until_manifest_removed(
    objects: LocalObjects, told: list[str]
) -> None:
    objects.offer([("/m/a", config_map(immutable=True))])
    objects.register(user("v", volume="c"))
    for changed in (
        config_map(value="2", immutable=True),
        config_map(immutable=False),
        config_map(value="2"),
    ):
        for _ in range(2):
            (problem,) = objects.offer([("/m/a", changed)])
            assert str(problem).startswith(
                "/m/a: configMap default/c is immutable and has changed: the old one"
            )
            assert await objects.config_map(static(), "c") == config_map(immutable=True)
    assert told == []
    assert objects.offer([("/m/a", config_map(immutable=True))]) == []
    objects.offer([])
    with pytest.raises(ObjectNotFound):
        await objects.config_map(static(), "c")
    assert objects.offer([("/m/a", config_map(value="2"))]) == []
    assert (await objects.config_map(static(), "c")).data == {"key": "2"}


async def test_local_objects_may_change_when_becoming_immutable(objects: LocalObjects) -> None:
    objects.offer([("/m/a", config_map())])
    assert objects.offer([("/m/a", config_map(value="2", immutable=True))]) == []
    assert len(objects.offer([("/m/a", config_map(value="3"))])) == 1


async def test_local_objects_docker_config_secret_is_used_as_pull_secret(objects: LocalObjects) -> None:
    login = base64.b64encode(b"robot:hunter2").decode()
    config = {"auths": {"registry.example.com": {"auth": login}}}
    document = {
        "apiVersion": "v1",
        "kind": "Secret",
        "metadata": {"name": "login"},
        "type": "kubernetes.io/dockerconfigjson",
        "stringData": {".dockerconfigjson": json.dumps(config)},
    }
    (given,) = read_manifest(json.dumps(document).encode(), "here").objects
    objects.offer([("/m/login.yaml", given)])
    found = await pull_secrets(user("web", pull="login"), objects, PodHistory())
    (credentials,) = secrets_keyring(found).lookup("registry.example.com/team/app")
    assert (credentials.username, credentials.password) == ("robot", "hunter2")
