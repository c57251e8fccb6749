"""Services, runtime classes and trust bundles: copies of the cluster's objects that pods lean on."""

import asyncio
import ssl
from collections.abc import AsyncIterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pykubelet.api.selector import LabelRequirement, LabelSelector
from pykubelet.apiserver.errors import Forbidden, Unreachable
from pykubelet.objects.base import ObjectError, ObjectNotFound
from pykubelet.objects.cluster_objects import ClusterObjects
from pykubelet.objects.runtime_classes import RuntimeClasses, default_handler
from pykubelet.objects.services import Services, no_services
from pykubelet.objects.trust_bundles import normalized
from pykubelet.util.tasks import TaskScope
from tests.support.object_api import ObjectApi, pod, settle

AWAY = Unreachable("https://api", "connection refused")


@pytest.fixture
def api() -> ObjectApi:
    return ObjectApi()


@pytest.fixture
async def scope() -> AsyncIterator[TaskScope]:
    async with TaskScope() as scope:
        yield scope


# Services


def a_service(address: str, *ports: dict[str, Any]) -> dict[str, Any]:
    return {
        "spec": {"clusterIP": address, "ports": list(ports), "selector": {"app": "x"}, "type": "ClusterIP"}
    }


async def test_services_env_follows_services_of_namespace(api: ObjectApi, scope: TaskScope) -> None:
    services = Services(api)
    assert services.env(pod()) is None
    api.put("services", "kubernetes", "default", **a_service("10.96.0.1", {"port": 443, "name": "https"}))
    api.put("services", "db", **a_service("10.96.0.7", {"port": 5432, "protocol": "TCP"}))
    api.put("services", "headless", **a_service("None"))
    api.put("services", "elsewhere", "other", **a_service("10.96.0.8", {"port": 1}))
    scope.start(services.run(), name="services")
    await settle()
    assert services.has_synced
    env = services.env(pod())
    assert env is not None
    assert {name: env[name] for name in ("KUBERNETES_SERVICE_HOST", "DB_PORT")} == {
        "KUBERNETES_SERVICE_HOST": "10.96.0.1",
        "DB_PORT": "tcp://10.96.0.7:5432",
    }
    assert not [name for name in env if name.startswith(("HEADLESS", "ELSEWHERE"))]
    plain = services.env(pod(enableServiceLinks=False))
    assert plain is not None
    assert all(name.startswith("KUBERNETES_") for name in plain)
    api.put("services", "cache", **a_service("10.96.0.9", {"port": 11211}))
    api.remove("services", "db")
    await settle()
    env = services.env(pod())
    assert env is not None
    assert env["CACHE_SERVICE_PORT"] == "11211"
    assert "DB_PORT" not in env


async def test_services_list_excludes_headless_by_field_selector(api: ObjectApi, scope: TaskScope) -> None:
    scope.start(Services(api).run(), name="services")
    await settle()
    assert [params["fieldSelector"] for _, _, params in api.asked] == ["spec.clusterIP!=None"] * 2


def test_no_services_returns_empty_env() -> None:
    assert no_services(pod()) == {}


# Runtime classes


async def test_runtime_classes_handler_returns_handler_of_class(api: ObjectApi, scope: TaskScope) -> None:
    api.put("runtimeclasses", "gvisor", "", handler="runsc")
    classes = RuntimeClasses(api, scope)
    assert await classes.handler(pod()) == ""
    assert await classes.handler(pod(runtimeClassName="")) == ""
    assert api.asked == []
    assert await classes.handler(pod(runtimeClassName="gvisor")) == "runsc"
    with pytest.raises(ObjectNotFound, match=r'^runtimeclass\.node\.k8s\.io "kata" not found$'):
        await classes.handler(pod(runtimeClassName="kata"))
    api.put("runtimeclasses", "kata", "", handler="kata")
    # Also before the watch has told of it.
    assert await classes.handler(pod(runtimeClassName="kata")) == "kata"
    await settle()
    api.broken = AWAY
    assert await classes.handler(pod(runtimeClassName="kata")) == "kata"
    assert await default_handler(pod(runtimeClassName="kata")) == ""


@pytest.mark.looptime
async def test_runtime_classes_handler_server_away_raises_object_error(
    api: ObjectApi, scope: TaskScope
) -> None:
    api.broken = AWAY
    classes = RuntimeClasses(api, scope)
    with pytest.raises(
        ObjectError, match=r"^failed to lookup RuntimeClass kata: runtime classes are not known"
    ):
        await classes.handler(pod(runtimeClassName="kata"))
    api.broken = None
    await asyncio.sleep(60)
    api.broken = Forbidden(403, "Forbidden", "you may not")
    with pytest.raises(ObjectError, match=r"^failed to lookup RuntimeClass kata: you may not$"):
        await classes.handler(pod(runtimeClassName="kata"))


# Trust bundles


def pem(*contents: bytes) -> str:
    return "".join(map(ssl.DER_cert_to_PEM_cert, contents))


ONE, TWO, THREE = b"a" * 100, b"b" * 10, b"c"
ALL = LabelSelector()


def bundle(api: ObjectApi, name: str, text: str, signer: str = "", **labels: str) -> None:
    spec = {"trustBundle": text, "signerName": signer}
    api.put("clustertrustbundles", name, "", spec=spec, labels=labels)


def projecting(name: str) -> Any:
    sources = [{"clusterTrustBundle": {"name": "roots", "path": "ca.pem"}}]
    return pod(name, volumes=[{"name": "v", "projected": {"sources": sources}}])


async def test_trust_bundle_selected_by_name_or_signer_and_labels(api: ObjectApi, scope: TaskScope) -> None:
    api.without = {"v1"}
    bundle(api, "roots", "a comment\n" + pem(TWO, ONE, TWO))
    bundle(api, "x:1", pem(ONE), "example.com/x", tier="one")
    bundle(api, "x:2", pem(THREE, ONE), "example.com/x", tier="two")
    bundle(api, "y:1", pem(TWO), "example.com/y", tier="one")
    objects, web = ClusterObjects(api, scope), projecting("web")
    assert await objects.trust_bundle(web, name="roots") == pem(ONE, TWO)
    signer = "example.com/x"
    assert await objects.trust_bundle(web, signer=signer, selector=ALL) == pem(ONE, THREE)
    chosen = LabelSelector(match_labels={"tier": "one"})
    assert await objects.trust_bundle(web, signer=signer, selector=chosen) == pem(ONE)
    for nothing in (None, LabelSelector(match_labels={"tier": "three"})):
        with pytest.raises(
            ObjectNotFound, match=r"^combination of signerName and labelSelector matched zero"
        ):
            await objects.trust_bundle(web, signer=signer, selector=nothing)
    with pytest.raises(ObjectNotFound, match=r'bundle\.certificates\.k8s\.io "absent" not found$'):
        await objects.trust_bundle(web, name="absent")
    wrong = LabelSelector(match_expressions=[LabelRequirement(key="tier", operator="Near")])
    with pytest.raises(ObjectError, match='while parsing label selector: "Near" is not a valid'):
        await objects.trust_bundle(web, signer=signer, selector=wrong)
    # One mirror for all: v1 was refused, v1beta1 was found, listed and watched.
    assert [verb for verb, _, _ in api.asked] == ["list", "list", "list", "watch"]


async def test_trust_bundle_gate_off_raises_without_request(api: ObjectApi, scope: TaskScope) -> None:
    bundle(api, "roots", pem(ONE))
    objects = ClusterObjects(api, scope, trust_bundles=False)
    with pytest.raises(ObjectError, match="requires the feature gate ClusterTrustBundleProjection"):
        await objects.trust_bundle(projecting("web"), name="roots")
    assert api.asked == []
    objects = ClusterObjects(api, scope, trust_bundles=True)
    assert await objects.trust_bundle(projecting("web"), name="roots") == pem(ONE)


async def test_trust_bundle_changed_notifies_only_referencing_pods(api: ObjectApi, scope: TaskScope) -> None:
    bundle(api, "roots", pem(ONE))
    objects, heard = ClusterObjects(api, scope), list[str]()
    web = projecting("web")
    objects.register(web)
    objects.register(pod("other"))
    await objects.trust_bundle(web, name="roots")
    await settle()
    objects.add_listener(heard.append)
    bundle(api, "roots", pem(TWO))
    await settle()
    assert heard == ["uid-web"]
    assert await objects.trust_bundle(web, name="roots") == pem(TWO)
    objects.unregister(web.uid)
    bundle(api, "roots", pem(THREE))
    await settle()
    assert heard == ["uid-web"]


async def test_trust_bundle_api_not_served_raises_object_error(api: ObjectApi, scope: TaskScope) -> None:
    objects = ClusterObjects(api, scope)
    api.without = {"v1", "v1beta1", "v1alpha1"}
    with pytest.raises(ObjectError, match="the API server has no ClusterTrustBundles"):
        await objects.trust_bundle(pod(), name="roots")
    api.broken = Forbidden(403, "Forbidden", "you may not")
    with pytest.raises(ObjectError, match="you may not"):
        await objects.trust_bundle(pod(), name="roots")
    api.broken = None
    api.without = {"v1", "v1beta1"}
    bundle(api, "roots", pem(ONE))
    assert await objects.trust_bundle(pod(), name="roots") == pem(ONE)


@given(st.lists(st.lists(st.binary(min_size=1, max_size=80), max_size=4), max_size=4))
def test_normalized_any_order_removes_duplicates(bundles: list[list[bytes]]) -> None:
    texts = [pem(*contents) for contents in bundles]
    assert (
        normalized(texts) == normalized(reversed(texts)) == pem(*sorted({one for b in bundles for one in b}))
    )
    assert normalized([normalized(texts)]) == normalized(texts)


@given(st.text(alphabet="-BEGINDCERTFA \n+/=x"))
def test_normalized_any_text_does_not_raise(text: str) -> None:
    normalized([text, f"-----BEGIN CERTIFICATE-----\n{text}\n-----END CERTIFICATE-----\n"])


# Label selectors


@pytest.mark.parametrize(
    ("operator", "values", "fitting"),
    [
        ("In", ["a", "b"], ["a"]),
        ("NotIn", ["a"], ["z", None]),
        ("Exists", [], ["a", "z"]),
        ("DoesNotExist", [], [None]),
    ],
)
def test_label_selector_fits_by_operator(operator: str, values: list[str], fitting: list[str | None]) -> None:
    selector = LabelSelector(match_expressions=[LabelRequirement(key="k", operator=operator, values=values)])
    found = [value for value in ("a", "z", None) if selector.fits({"k": value} if value is not None else {})]
    assert found == fitting
