"""What pods need from a real API server, asked for as a real node: allowed just what its pods refer to."""

import asyncio
import base64
import contextlib
import json
from collections.abc import AsyncIterator, Callable, Iterator
from functools import partial
from typing import Any

import pytest
import yaml

from pykubelet.api.meta import from_document
from pykubelet.api.pod import Pod
from pykubelet.apiserver import rest_config as kubeconfig
from pykubelet.apiserver.client import ApiClient
from pykubelet.apiserver.transport import Transport
from pykubelet.objects.base import ObjectError, ObjectNotFound
from pykubelet.objects.cluster_objects import ClusterObjects
from pykubelet.objects.runtime_classes import RuntimeClasses
from pykubelet.objects.services import Services
from pykubelet.util.rate_limiter import TokenBucket
from pykubelet.util.tasks import TaskScope
from tests.support.plane import Document, Plane, pod_document, unique

SECONDS = 60.0
STRATEGIES = ("Watch", "Cache", "Get")


@pytest.fixture
def node_name(plane: Plane) -> Iterator[str]:
    """A node that nobody runs."""
    name = unique("objects")
    plane.create({"apiVersion": "v1", "kind": "Node", "metadata": {"name": name}})
    yield name
    plane.delete("node", name)


@pytest.fixture
async def client(plane: Plane, node_name: str) -> AsyncIterator[ApiClient]:
    """A client with the node's own identity."""
    access = kubeconfig.load(
        plane.node_kubeconfig(node_name), lambda path: dict(yaml.safe_load(path.read_text()))
    )
    async with Transport(access) as transport:
        yield ApiClient(transport, TokenBucket(50, 100))


@pytest.fixture
async def scope(client: ApiClient) -> AsyncIterator[TaskScope]:
    async with TaskScope() as scope:
        yield scope


async def until(what: str, look: Callable[[], object]) -> None:
    """Wait for a condition."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(SECONDS):
            while not look():
                await asyncio.sleep(0.02)
    assert look(), what


def created(plane: Plane, namespace: str, node: str, *volumes: Document, **spec: Any) -> Pod:
    """A pod of this node as the API server gives it out."""
    volumes_ = [{"name": f"v{index}", **volume} for index, volume in enumerate(volumes)]
    document = pod_document(unique("pod"), namespace, node, volumes=volumes_, **spec)
    return from_document(Pod, plane.create(document))


def config_map(namespace: str, name: str, **fields: Any) -> Document:
    metadata = {"name": name, "namespace": namespace}
    return {"apiVersion": "v1", "kind": "ConfigMap", "metadata": metadata, **fields}


def secret(namespace: str, name: str, **data: str) -> Document:
    return {
        "apiVersion": "v1",
        "kind": "Secret",
        "metadata": {"name": name, "namespace": namespace},
        "data": {key: base64.b64encode(value.encode()).decode() for key, value in data.items()},
    }


async def eventually(ask: Callable[[], Any]) -> Any:
    """Ask again while the API server has not noted yet which objects the node's pods refer to."""
    async with asyncio.timeout(SECONDS):
        while True:
            try:
                return await ask()
            except ObjectNotFound:
                raise
            except ObjectError:
                await asyncio.sleep(0.1)


@pytest.mark.parametrize("strategy", STRATEGIES)
async def test_cluster_objects_referenced_objects_returned_others_forbidden(
    plane: Plane, namespace: str, node_name: str, client: ApiClient, scope: TaskScope, strategy: str
) -> None:
    plane.create(config_map(namespace, "settings", data={"color": "blue"}))
    plane.create(secret(namespace, "keys", token="s3cret"))
    plane.create(secret(namespace, "not-ours"))
    pod = created(
        plane,
        namespace,
        node_name,
        {"configMap": {"name": "settings"}},
        {"secret": {"secretName": "keys"}},
        {"configMap": {"name": "absent", "optional": True}},
    )
    objects = ClusterObjects(client, scope, strategy=strategy)
    objects.register(pod)
    assert (await eventually(lambda: objects.config_map(pod, "settings"))).data == {"color": "blue"}
    assert (await eventually(lambda: objects.secret(pod, "keys"))).data == {"token": b"s3cret"}
    assert "ca.crt" in (await eventually(lambda: objects.config_map(pod, "kube-root-ca.crt"))).data
    words = 'configmap "absent" not found' if strategy == "Watch" else 'configmaps "absent" not found'
    with pytest.raises(ObjectNotFound) as missing:
        await eventually(lambda: objects.config_map(pod, "absent"))
    assert str(missing.value) == words
    with pytest.raises(ObjectError, match="no relationship found between node") as refused:
        await objects.secret(pod, "not-ours")
    assert str(refused.value).startswith('secrets "not-ours" is forbidden: User "system:node:')


async def test_cluster_objects_change_notifies_listener_immediately(
    plane: Plane, namespace: str, node_name: str, client: ApiClient, scope: TaskScope
) -> None:
    plane.create(config_map(namespace, "settings", data={"a": "1"}))
    pod = created(plane, namespace, node_name, {"configMap": {"name": "settings"}})
    objects, heard = ClusterObjects(client, scope), list[str]()
    objects.register(pod)
    await eventually(lambda: objects.config_map(pod, "settings"))
    objects.add_listener(heard.append)
    plane.patch("configmap", "settings", namespace, {"data": {"a": "2"}})
    await until("the change to be told", lambda: heard == [pod.uid])
    assert (await objects.config_map(pod, "settings")).data == {"a": "2"}
    plane.delete("configmap", "settings", namespace)
    await until("the deletion to be told", lambda: len(heard) == 2)
    with pytest.raises(ObjectNotFound):
        await objects.config_map(pod, "settings")
    plane.create(config_map(namespace, "settings", data={"a": "3"}, immutable=True))
    await until("the new one to be told", lambda: len(heard) == 3)
    assert (await objects.config_map(pod, "settings")).data == {"a": "3"}


async def test_cluster_objects_many_pods_share_one_watch(
    plane: Plane, namespace: str, node_name: str, client: ApiClient, scope: TaskScope
) -> None:
    mark = plane.audit_mark()
    pods = [created(plane, namespace, node_name) for _ in range(20)]
    objects, heard = ClusterObjects(client, scope), list[str]()
    for pod in pods:
        objects.register(pod)
    for pod in pods:
        await eventually(partial(objects.config_map, pod, "kube-root-ca.crt"))
    # The list is enough to know it; the watch begins after that.
    objects.add_listener(heard.append)
    change = {"metadata": {"annotations": {"looked-at": "yes"}}}
    plane.patch("configmap", "kube-root-ca.crt", namespace, change)
    await until("the watch to tell all of them", lambda: set(heard) == {pod.uid for pod in pods})
    for pod in pods:
        objects.unregister(pod.uid)

    def watches() -> list[Document]:
        return [
            event
            for event in plane.audit(mark)
            if event["verb"] == "watch" and event["user"]["username"] == f"system:node:{node_name}"
        ]

    await until("the watch to end", watches)
    (watch,) = watches()
    assert f"/namespaces/{namespace}/configmaps?" in watch["requestURI"]
    assert "fieldSelector=metadata.name%3Dkube-root-ca.crt" in watch["requestURI"]


async def test_cluster_objects_token_cached_and_bound_to_pod(
    plane: Plane, namespace: str, node_name: str, client: ApiClient, scope: TaskScope
) -> None:
    vault = {"serviceAccountToken": {"audience": "vault", "path": "token"}}
    pod = created(plane, namespace, node_name, {"projected": {"sources": [vault]}})
    objects = ClusterObjects(client, scope)
    token = await eventually(lambda: objects.token(pod, audience="", seconds=3607))
    assert await objects.token(pod, audience="", seconds=3607) == token
    body = token.split(".")[1]
    claims: Document = json.loads(base64.urlsafe_b64decode(body + "=" * (-len(body) % 4)))
    assert claims["kubernetes.io"]["pod"] == {"name": pod.metadata.name, "uid": pod.uid}
    assert claims["kubernetes.io"]["node"]["name"] == node_name
    assert await objects.token(pod, audience="vault", seconds=600) != token
    with pytest.raises(ObjectError, match='audience "other" not found in pod spec volume'):
        await objects.token(pod, audience="other", seconds=600)
    plane.delete("pod", pod.metadata.name, namespace, grace=0)
    objects.unregister(pod.uid)
    with pytest.raises(ObjectError, match=r"^failed to fetch token: "):
        await objects.token(pod, audience="", seconds=3607)


async def test_services_env_and_runtime_class_handler_from_api_server(
    plane: Plane, namespace: str, node_name: str, client: ApiClient, scope: TaskScope
) -> None:
    services, name = Services(client), unique("class")
    scope.start(services.run(), name="services")
    spec = {"ports": [{"port": 80, "name": "http"}], "selector": {"app": "x"}}
    metadata = {"name": "web", "namespace": namespace}
    plane.create({"apiVersion": "v1", "kind": "Service", "metadata": metadata, "spec": spec})
    plane.create(
        {
            "apiVersion": "v1",
            "kind": "Service",
            "metadata": {"name": "headless", "namespace": namespace},
            "spec": spec | {"clusterIP": "None"},
        }
    )
    runtime_class = {"apiVersion": "node.k8s.io/v1", "kind": "RuntimeClass", "metadata": {"name": name}}
    plane.create(runtime_class | {"handler": "runsc"})
    try:
        pod = created(plane, namespace, node_name)
        await until("the service to be seen", lambda: "WEB_SERVICE_HOST" in (services.env(pod) or {}))
        env = dict(services.env(pod) or {})
        address = plane.get("service", "web", namespace)["spec"]["clusterIP"]
        assert env["WEB_PORT_80_TCP"] == f"tcp://{address}:80"
        assert env["KUBERNETES_SERVICE_PORT_HTTPS"] == "443"
        assert not any(variable.startswith("HEADLESS") for variable in env)
        classes = RuntimeClasses(client, scope)
        pod.spec.runtime_class_name = name
        assert await classes.handler(pod) == "runsc"
        pod.spec.runtime_class_name = "absent"
        with pytest.raises(ObjectNotFound, match=r'^runtimeclass\.node\.k8s\.io "absent" not found$'):
            await classes.handler(pod)
    finally:
        plane.delete("runtimeclass", name)


async def test_cluster_objects_trust_bundle_absent_raises_object_error(
    plane: Plane, namespace: str, node_name: str, client: ApiClient, scope: TaskScope
) -> None:
    """Most API servers do not serve them; the answer is the same for both kinds."""
    pod = created(plane, namespace, node_name)
    objects = ClusterObjects(client, scope)
    with pytest.raises(ObjectError, match=r"ClusterTrustBundles|clustertrustbundle"):
        await objects.trust_bundle(pod, name="absent")
