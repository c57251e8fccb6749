"""ConfigMaps and secrets by each strategy, and who hears of their changes."""

import asyncio
from collections.abc import AsyncIterator, Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pykubelet.api.pod import Pod
from pykubelet.apiserver.errors import Forbidden, Unreachable
from pykubelet.objects.base import NoObjects, ObjectError, ObjectNotFound
from pykubelet.objects.cluster_objects import ClusterObjects, object_ttl
from pykubelet.objects.fetch import RETRY_DELAYS_SECONDS
from pykubelet.util.tasks import TaskScope
from tests.support.object_api import ObjectApi, pod, settle, volumes

AWAY = Unreachable("https://api", "connection refused")
STRANGE = Forbidden(403, "Forbidden", "no relationship found between node 'one' and this object")
FORBIDDEN = Forbidden(403, "Forbidden", 'secrets "keys" is forbidden: User "x" cannot get it')
ROOT_CA = "kube-root-ca.crt"


@pytest.fixture
def api() -> ObjectApi:
    return ObjectApi()


Make = Callable[..., ClusterObjects]


@pytest.fixture
async def make(api: ObjectApi) -> AsyncIterator[Make]:
    async with TaskScope() as scope:
        yield lambda strategy="Watch", **options: ClusterObjects(api, scope, strategy=strategy, **options)
    await settle()
    assert not api.watchers


def following(objects: ClusterObjects) -> list[str]:
    heard: list[str] = []
    objects.add_listener(heard.append)
    return heard


def a_pod(name: str = "web", **kinds: str) -> Pod:
    return pod(name, volumes=volumes(**(kinds or {"configMap": "settings"})))


async def test_watch_strategy_pods_with_same_object_share_watch(make: Make, api: ObjectApi) -> None:
    objects = make()
    api.put("configmaps", ROOT_CA, data={"ca.crt": "PEM"})
    pods = [a_pod(f"p{n}", configMap=ROOT_CA) for n in range(110)]
    for one in pods:
        objects.register(one)
    found = await asyncio.gather(*(objects.config_map(one, ROOT_CA) for one in pods))
    assert {tuple(config_map.data.items()) for config_map in found} == {(("ca.crt", "PEM"),)}
    await settle()
    assert len(api.watchers) == 1
    assert [verb for verb, _, _ in api.asked] == ["list", "watch"]
    assert all(params["fieldSelector"] == f"metadata.name={ROOT_CA}" for _, _, params in api.asked)
    for one in pods[1:]:
        objects.unregister(one.uid)
    await settle()
    assert len(api.watchers) == 1
    objects.unregister(pods[0].uid)
    objects.unregister(pods[0].uid)
    await settle()
    assert not api.watchers


async def test_register_pod_again_replaces_watched_objects(make: Make, api: ObjectApi) -> None:
    objects = make()
    objects.register(a_pod(configMap="one", secret="keys"))
    objects.register(a_pod(configMap="two", secret="keys"))
    await settle()
    watched = {(kind, selector) for kind, selector, _ in api.watchers}
    assert watched == {("configmaps", "metadata.name=two"), ("secrets", "metadata.name=keys")}


@settings(max_examples=50, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 3), st.frozensets(st.sampled_from("abc"))), max_size=12))
def test_register_any_sequence_watches_exactly_referenced_objects(
    steps: list[tuple[int, frozenset[str]]],
) -> None:
    async def play() -> None:
        api, wanted = ObjectApi(), dict[int, frozenset[str]]()
        async with TaskScope() as scope:
            objects = ClusterObjects(api, scope)
            for number, names in steps:
                # Nothing to refer to stands for a pod that is gone.
                if names:
                    listed = [{"name": f"v{name}", "configMap": {"name": name}} for name in names]
                    objects.register(pod(uid=str(number), volumes=listed))
                else:
                    objects.unregister(str(number))
                wanted[number] = names
                await settle()
                selectors = [selector for _, selector, _ in api.watchers]
                assert sorted(selectors) == sorted(
                    f"metadata.name={name}" for name in frozenset().union(*wanted.values())
                )

    asyncio.run(play())


async def test_watch_strategy_object_changed_notifies_only_referencing_pods(
    make: Make, api: ObjectApi
) -> None:
    objects = make()
    heard = following(objects)
    api.put("configmaps", "settings", data={"a": "1"})
    web, other = a_pod("web"), a_pod("other", secret="keys")
    for one in (web, a_pod("twin"), other):
        objects.register(one)
    await objects.config_map(web, "settings")
    await settle()
    assert heard == []
    api.put("configmaps", "settings", data={"a": "2"})
    await settle()
    assert heard == ["uid-twin", "uid-web"]
    assert (await objects.config_map(web, "settings")).data == {"a": "2"}
    api.remove("configmaps", "settings")
    await settle()
    assert len(heard) == 4
    with pytest.raises(ObjectNotFound, match=r'^configmap "settings" not found$'):
        await objects.config_map(web, "settings")
    assert api.count("get") == 0
    api.put("configmaps", "settings", data={"a": "3"})
    await settle()
    assert len(heard) == 6
    objects.unregister(web.uid)
    api.put("configmaps", "settings", data={"a": "4"})
    await settle()
    assert heard[6:] == ["uid-twin"]


async def test_watch_strategy_stale_list_falls_back_to_get(make: Make, api: ObjectApi) -> None:
    objects = make()
    api.put("secrets", "keys", data={"k": "eA=="})
    api.behind = {"keys"}
    web = a_pod(secret="keys", configMap="absent")
    objects.register(web)
    assert (await objects.secret(web, "keys")).data == {"k": b"x"}
    for _ in range(3):
        with pytest.raises(ObjectNotFound, match=r'^configmap "absent" not found$'):
            await objects.config_map(web, "absent")
    # Once it is certain that there is none, the watch is trusted.
    assert api.count("get") == 2


@pytest.mark.looptime
async def test_watch_strategy_sync_times_out_after_one_second(make: Make, api: ObjectApi) -> None:
    objects = make()
    heard = following(objects)
    loop = asyncio.get_running_loop()
    api.put("secrets", "keys", data={"k": "eA=="})
    web = a_pod(secret="keys")
    api.broken = STRANGE
    begin = loop.time()
    objects.register(web)
    message = r"^failed to sync secret cache: timed out waiting for the condition$"
    with pytest.raises(ObjectError, match=message):
        await objects.secret(web, "keys")
    assert loop.time() - begin == pytest.approx(1)
    api.broken = None
    await asyncio.sleep(30)
    # Who was left waiting hears that it makes sense to ask again.
    assert heard == ["uid-web"]
    assert (await objects.secret(web, "keys")).data == {"k": b"x"}


@pytest.mark.looptime
@pytest.mark.parametrize("strategy", ["Watch", "Cache", "Get"])
async def test_cluster_objects_node_authorizer_denies_first_is_retried(
    make: Make, api: ObjectApi, strategy: str
) -> None:
    objects = make(strategy)
    api.put("secrets", "keys", data={"k": "eA=="})
    web = a_pod(secret="keys")
    api.refusals = [STRANGE, STRANGE]
    begin = asyncio.get_running_loop().time()
    objects.register(web)
    assert (await objects.secret(web, "keys")).data == {"k": b"x"}
    assert asyncio.get_running_loop().time() - begin == pytest.approx(sum(RETRY_DELAYS_SECONDS[:2]))


@pytest.mark.looptime
@pytest.mark.parametrize("strategy", ["Cache", "Get"])
async def test_cluster_objects_node_authorizer_denies_always_raises_object_error(
    make: Make, api: ObjectApi, strategy: str
) -> None:
    objects = make(strategy)
    web = a_pod(secret="keys")
    objects.register(web)
    api.broken = STRANGE
    with pytest.raises(ObjectError, match=r"^no relationship found between node"):
        await objects.secret(web, "keys")
    assert api.count("get") == 1 + len(RETRY_DELAYS_SECONDS)
    # Another reason to refuse is no matter of time.
    api.broken, api.asked = FORBIDDEN, []
    with pytest.raises(ObjectError, match="cannot get"):
        await objects.secret(web, "keys")
    assert api.count("get") == 1


@pytest.mark.looptime
async def test_watch_strategy_list_denied_always_backs_off(make: Make, api: ObjectApi) -> None:
    objects = make()
    api.broken = STRANGE
    objects.register(a_pod(secret="keys"))
    await asyncio.sleep(sum(RETRY_DELAYS_SECONDS) + 0.01)
    assert api.count("list") == 1 + len(RETRY_DELAYS_SECONDS)
    # From now on with pauses that grow from a tenth of a second, and at least double.
    await asyncio.sleep(10)
    assert api.count("list") <= 1 + len(RETRY_DELAYS_SECONDS) + 7


async def test_watch_strategy_unreadable_object_raises_object_error(make: Make, api: ObjectApi) -> None:
    objects = make()
    api.put("configmaps", "settings", data=["no", "mapping"])
    web = a_pod()
    objects.register(web)
    with pytest.raises(ObjectError, match="configmap shop/settings cannot be read: Expected `object`"):
        await objects.config_map(web, "settings")


async def test_watch_strategy_immutable_object_stops_watch(make: Make, api: ObjectApi) -> None:
    objects = make()
    api.put("configmaps", "settings", data={"a": "1"}, immutable=True)
    web = a_pod()
    objects.register(web)
    await objects.config_map(web, "settings")
    await settle()
    assert not api.watchers
    asked = len(api.asked)
    api.broken = AWAY
    assert (await objects.config_map(web, "settings")).data == {"a": "1"}
    assert len(api.asked) == asked


@pytest.mark.looptime
async def test_watch_strategy_idle_object_stops_watch(make: Make, api: ObjectApi) -> None:
    objects = make(idle_seconds=300)
    api.put("configmaps", "settings", data={"a": "1"})
    api.put("secrets", "keys", data={})
    web = a_pod(configMap="settings", secret="keys")
    objects.register(web)
    await objects.secret(web, "keys")
    for _ in range(7):
        await objects.config_map(web, "settings")
        await asyncio.sleep(60)
    assert [kind for kind, _, _ in api.watchers] == ["configmaps"]
    api.put("secrets", "keys", data={"k": "eA=="})
    assert (await objects.secret(web, "keys")).data == {"k": b"x"}
    await settle()
    assert sorted(kind for kind, _, _ in api.watchers) == ["configmaps", "secrets"]


@pytest.mark.looptime
async def test_watch_strategy_server_away_first_list_is_retried_while_idle(
    make: Make, api: ObjectApi
) -> None:
    objects = make()
    api.broken = AWAY
    objects.register(a_pod())
    await asyncio.sleep(3600)
    api.broken = None
    await asyncio.sleep(120)
    assert api.count("watch") == 1


async def test_watch_strategy_pod_not_registered_gets_without_watch(make: Make, api: ObjectApi) -> None:
    objects = make()
    api.put("configmaps", "settings", data={"a": "1"})
    assert (await objects.config_map(a_pod(), "settings")).data == {"a": "1"}
    with pytest.raises(ObjectNotFound, match=r'^secrets "keys" not found$'):
        await objects.secret(a_pod(), "keys")
    api.broken = Forbidden(403, "Forbidden", 'configmaps "settings" is forbidden: User "x" cannot')
    with pytest.raises(ObjectError, match=r'^configmaps "settings" is forbidden: User "x" cannot$'):
        await objects.config_map(a_pod(), "settings")
    api.broken = AWAY
    with pytest.raises(ObjectError, match="cannot be reached: connection refused"):
        await objects.config_map(a_pod(), "settings")
    assert not api.watchers


# Cache


@pytest.mark.looptime
@pytest.mark.parametrize(("ttl", "seconds"), [(None, 60), (10.0, 10)])
async def test_cache_strategy_object_is_cached_for_ttl(
    make: Make, api: ObjectApi, ttl: float | None, seconds: float
) -> None:
    objects = make("Cache", ttl=lambda: ttl)
    heard = following(objects)
    api.put("configmaps", "settings", data={"a": "1"})
    web = a_pod()
    objects.register(web)
    objects.register(web)
    await asyncio.gather(*(objects.config_map(web, "settings") for _ in range(5)))
    api.put("configmaps", "settings", data={"a": "2"})
    await asyncio.sleep(seconds - 1)
    assert (await objects.config_map(web, "settings")).data == {"a": "1"}
    assert [params for _, _, params in api.asked] == [{}]
    await asyncio.sleep(2)
    assert (await objects.config_map(web, "settings")).data == {"a": "2"}
    # Another look may be served from the server's memory.
    assert [params for _, _, params in api.asked] == [{}, {"resourceVersion": "0"}]
    assert heard == ["uid-web"]


@pytest.mark.looptime
async def test_cache_strategy_ttl_zero_gets_every_time(make: Make, api: ObjectApi) -> None:
    objects = make("Cache", ttl=lambda: 0.0)
    api.put("configmaps", "settings", data={"a": "1"})
    web = a_pod()
    objects.register(web)
    for _ in range(3):
        await objects.config_map(web, "settings")
    assert len(api.asked) == 3


@pytest.mark.looptime
async def test_cache_strategy_pod_registered_invalidates_object(make: Make, api: ObjectApi) -> None:
    objects = make("Cache")
    api.put("configmaps", "settings", data={"a": "1"})
    web, twin = a_pod("web"), a_pod("twin")
    objects.register(web)
    await objects.config_map(web, "settings")
    api.put("configmaps", "settings", data={"a": "2"})
    objects.register(twin)
    assert (await objects.config_map(twin, "settings")).data == {"a": "2"}
    assert [params for _, _, params in api.asked] == [{}, {}]
    objects.unregister(web.uid)
    objects.unregister(twin.uid)
    await objects.config_map(web, "settings")
    await objects.config_map(web, "settings")
    assert len(api.asked) == 4


@pytest.mark.looptime
async def test_cache_strategy_server_away_returns_cached_object(make: Make, api: ObjectApi) -> None:
    objects = make("Cache")
    web = a_pod()
    objects.register(web)
    api.broken = AWAY
    with pytest.raises(ObjectError, match="cannot be reached"):
        await objects.config_map(web, "settings")
    api.broken = None
    with pytest.raises(ObjectNotFound, match=r'^configmaps "settings" not found$'):
        await objects.config_map(web, "settings")
    api.put("configmaps", "settings", data={"a": "1"})
    await objects.config_map(web, "settings")
    api.broken = AWAY
    await asyncio.sleep(3600)
    assert (await objects.config_map(web, "settings")).data == {"a": "1"}


@pytest.mark.looptime
async def test_cache_strategy_older_version_keeps_newer_object(make: Make, api: ObjectApi) -> None:
    objects = make("Cache")
    web = a_pod()
    objects.register(web)
    api.put("configmaps", "settings", data={"a": "1"})
    older = dict(api.objects["configmaps", "shop", "settings"])
    api.put("configmaps", "settings", data={"a": "2"})
    await objects.config_map(web, "settings")
    api.objects["configmaps", "shop", "settings"] = older
    await asyncio.sleep(61)
    assert (await objects.config_map(web, "settings")).data == {"a": "2"}
    api.remove("configmaps", "settings")
    with pytest.raises(ObjectNotFound):
        await objects.config_map(web, "settings")


@pytest.mark.parametrize(
    ("annotations", "seconds"),
    [
        ({}, None),
        ({"node.alpha.kubernetes.io/ttl": "30"}, 30),
        ({"node.alpha.kubernetes.io/ttl": "0"}, 0),
        ({"node.alpha.kubernetes.io/ttl": "soon"}, None),
    ],
)
def test_object_ttl_reads_node_annotation_and_ignores_invalid(
    annotations: dict[str, str], seconds: float | None
) -> None:
    assert object_ttl(annotations) == seconds


# Get


async def test_get_strategy_gets_every_time(make: Make, api: ObjectApi) -> None:
    objects = make("Get")
    api.put("secrets", "keys", data={"k": "eA=="})
    web = a_pod(secret="keys")
    objects.register(web)
    for _ in range(3):
        assert (await objects.secret(web, "keys")).data == {"k": b"x"}
    objects.unregister(web.uid)
    assert [asked[:2] for asked in api.asked] == [("get", "secrets/shop/keys")] * 3


async def test_no_objects_any_call_raises_object_error() -> None:
    objects, web = NoObjects(), a_pod()
    objects.register(web)
    for ask in (
        objects.config_map(web, "x"),
        objects.secret(web, "x"),
        objects.token(web, audience="", seconds=600),
        objects.trust_bundle(web, name="x"),
    ):
        with pytest.raises(ObjectError, match=r"^couldn't get .*: this node has no API server to ask$"):
            await ask
