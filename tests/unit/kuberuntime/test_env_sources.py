"""From the cluster's objects to a container's variables, and to the words when one is missing."""

import asyncio
import threading
import time
from collections.abc import Collection
from pathlib import Path
from typing import Any, cast

import pytest

from pykubelet.api.core import ConfigMap, Secret
from pykubelet.api.meta import from_document
from pykubelet.api.pod import Container, Pod
from pykubelet.cri import runtime_pb2 as pb
from pykubelet.images.image_manager import PresentImage
from pykubelet.kuberuntime.configuration import env as env_sources
from pykubelet.kuberuntime.configuration.config_builder import PodStartContext
from pykubelet.kuberuntime.configuration.cri_configs import make_container_config
from pykubelet.kuberuntime.configuration.env import EnvFile, container_env, gather_env_sources, parse_env_file
from pykubelet.kuberuntime.configuration.options import RuntimeNodeOptions
from pykubelet.kuberuntime.errors import ContainerConfigError, StartError
from pykubelet.kuberuntime.observe import Observer
from pykubelet.kuberuntime.observed import ObservedPod
from pykubelet.objects.base import NoObjects, ObjectError, ObjectNotFound
from pykubelet.podconfig.pod_history import PodHistory
from pykubelet.volumes.plugin import MountedVolume
from tests.support.containers import make_facts, make_pod
from tests.support.golden import as_recorded, unordered_env
from tests.support.threads import forbid_threads
from tests.unit.kuberuntime.starting import make_starter
from tests.unit.kuberuntime.test_golden_requests import container_facts, given, given_pod, recordings


class Objects(NoObjects):
    """Some objects, and what goes wrong with others."""

    def __init__(self, **found: ConfigMap | Secret | ObjectError) -> None:
        self.found = found
        self.asked: list[str] = []

    async def config_map(self, pod: Pod, name: str) -> ConfigMap:
        found = await self._give(name, f'configmap "{name}" not found')
        assert isinstance(found, ConfigMap)
        return found

    async def secret(self, pod: Pod, name: str) -> Secret:
        found = await self._give(name, f'secret "{name}" not found')
        assert isinstance(found, Secret)
        return found

    async def _give(self, name: str, missing: str) -> ConfigMap | Secret:
        self.asked.append(name)
        await asyncio.sleep(0.5)
        found = self.found.get(name, ObjectNotFound(missing))
        if isinstance(found, ObjectError):
            raise found
        return found


def env(*variables: dict[str, Any], **fields: Any) -> Container:
    return from_document(Container, {"name": "main", "env": list(variables), **fields})


def key(name: str, key: str = "k", kind: str = "configMap", **more: Any) -> dict[str, Any]:
    return {"name": f"V_{name}", "valueFrom": {f"{kind}KeyRef": {"name": name, "key": key, **more}}}


@pytest.mark.looptime
@pytest.mark.parametrize(
    ("stem", "name", "recorded"), [item for item in recordings() if item.values[0] == "given-env"]
)
async def test_gather_env_sources_recorded_pod_env_equals_upstream(
    stem: str, name: str, recorded: list[dict[str, Any]]
) -> None:
    found: dict[str, ConfigMap | Secret | ObjectError] = {}
    for document in given(stem):
        if document["kind"] == "ConfigMap":
            found[document["metadata"]["name"]] = ConfigMap(data=document["data"])
        elif document["kind"] == "Secret":
            data = {key: value.encode() for key, value in document["stringData"].items()}
            found[document["metadata"]["name"]] = Secret(data=data)
    pod, document = given_pod(stem, name)
    (container,) = pod.spec.containers
    objects = Objects(**found)
    begin = asyncio.get_running_loop().time()
    sources = await gather_env_sources(objects, pod, container, {})
    # Everything once, and all at the same time.
    assert sorted(objects.asked) == ["absent", "keys", "settings"]
    assert asyncio.get_running_loop().time() - begin < 1
    facts = container_facts(stem, pod, document, container)
    facts = make_facts(
        node=facts.node,
        image=facts.image,
        pod_ips=facts.pod_ips,
        hosts_file=facts.hosts_file,
        termination_log=facts.termination_log,
        volumes=facts.volumes,
        service_env=facts.service_env,
        config_map=sources.config_map,
        secret=sources.secret,
    )
    (request,) = [call for call in recorded if call["method"] == "CreateContainer"]
    ours = as_recorded(make_container_config(pod, container, facts))
    assert unordered_env(ours) == unordered_env(request["config"])


async def test_gather_env_sources_no_references_fetches_nothing() -> None:
    objects = Objects()
    plain = env({"name": "A", "value": "1"}, envFrom=[{"prefix": "x"}])
    await gather_env_sources(objects, make_pod(), plain, {})
    assert objects.asked == []


class Started:
    """A starter that gets as far as the request for a container."""

    def __init__(self, root: Path, objects: Objects | None, services: dict[str, str] | None) -> None:
        self.journal = PodHistory()
        nothing = cast(Any, None)
        self.starter = make_starter(
            nothing,
            Observer(nothing),
            RuntimeNodeOptions(pod_logs_dir=str(root / "logs")),
            root,
            self.journal,
            objects=objects,
            services=lambda pod: services,
        )

    async def failure(self, container: Container, **volumes: Path) -> StartError:
        pod = make_pod(container)
        mounted = {name: MountedVolume(str(path)) for name, path in volumes.items()}
        with pytest.raises(StartError) as caught:
            await self.starter.start_container(
                pod,
                container,
                PresentImage("sha256:x", 0, ""),
                "sandbox",
                pb.PodSandboxConfig(),
                PodStartContext("/kubepods", mounted),
                ("10.0.0.2",),
                ObservedPod(uid=pod.uid),
            )
        assert caught.value.reason == "CreateContainerConfigError"
        (event,) = self.journal.events(pod.uid)
        assert (event.kind, event.reason, event.where) == ("Warning", "Failed", "spec.containers{main}")
        assert event.message == f"Error: {caught.value.message}"
        return caught.value


@pytest.mark.looptime
@pytest.mark.parametrize(
    ("container", "message"),
    [
        (env(key("absent")), 'configmap "absent" not found'),
        (env(key("absent", kind="secret")), 'secret "absent" not found'),
        (env(envFrom=[{"configMapRef": {"name": "absent"}}]), 'configmap "absent" not found'),
        (env(envFrom=[{"secretRef": {"name": "absent"}}]), 'secret "absent" not found'),
        (env(key("settings", "x")), "couldn't find key x in ConfigMap shop/settings"),
        (env(key("keys", "x", "secret")), "couldn't find key x in Secret shop/keys"),
        (env(key("late")), "failed to sync configmap cache: timed out waiting for the condition"),
        # Optional is what does not exist; what cannot be had now is waited for.
        (
            env(key("late", optional=True)),
            "failed to sync configmap cache: timed out waiting for the condition",
        ),
        # The first in the pod's order is told.
        (env(key("settings"), key("zzz"), key("aaa")), 'configmap "zzz" not found'),
        (
            env(
                key("absent", optional=True), key("settings", "x", optional=True), key("keys", "y", "secret")
            ),
            "couldn't find key y in Secret shop/keys",
        ),
    ],
)
async def test_start_container_missing_env_source_records_event_and_error(
    tmp_path: Path, container: Container, message: str
) -> None:
    late = ObjectError("failed to sync configmap cache: timed out waiting for the condition")
    objects = Objects(settings=ConfigMap(data={"k": "v"}), keys=Secret(data={"k": b"v"}), late=late)
    failure = await Started(tmp_path, objects, {}).failure(container)
    assert (failure.message, failure.retry_after) == (message, None)


async def test_start_container_services_unknown_retried_after_one_second(tmp_path: Path) -> None:
    failure = await Started(tmp_path, Objects(), None).failure(env())
    assert failure.message == "services have not yet been read at least once, cannot construct envvars"
    assert failure.retry_after == 1.0


async def test_start_container_no_api_server_error_names_config_map(tmp_path: Path) -> None:
    failure = await Started(tmp_path, None, {}).failure(env(key("settings")))
    assert failure.message == "couldn't get configMap shop/settings: this node has no API server to ask"


def in_file(volume: str, path: str, key: str = "K") -> dict[str, Any]:
    ref = {"volumeName": volume, "path": path, "key": key}
    return {"name": f"V_{key}", "valueFrom": {"fileKeyRef": ref}}


async def test_gather_env_sources_file_in_volume_returns_values(tmp_path: Path) -> None:
    (tmp_path / "app").mkdir()
    (tmp_path / "app/one.env").write_bytes(b"K='v'\nL='\xff'\n")
    container = env(in_file("v", "app/one.env"), in_file("v", "app/one.env", "L"))
    volumes = {"v": MountedVolume(str(tmp_path))}
    sources = await gather_env_sources(Objects(), make_pod(container), container, volumes)
    facts = make_facts(volumes=volumes, env_file=sources.file_value)
    assert container_env(make_pod(container), container, facts) == {"V_K": "v", "V_L": "\udcff"}


async def test_gather_env_sources_without_further_threads_fails_container(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    forbid_threads(monkeypatch)
    container = env(in_file("v", "one.env"))
    volumes = {"v": MountedVolume(str(tmp_path))}
    sources = await gather_env_sources(Objects(), make_pod(container), container, volumes)
    facts = make_facts(volumes=volumes, env_file=sources.file_value)
    with pytest.raises(ContainerConfigError, match="cannot start a thread"):
        container_env(make_pod(container), container, facts)


@pytest.mark.parametrize(
    ("wish", "message"),
    [
        (in_file("other", "f"), 'cannot find the volume "other" referenced by FileKeyRef'),
        (in_file("v", "absent"), "couldn't parse env file: [Errno 2] No such file or directory"),
        (in_file("v", "out"), "couldn't parse env file: [Errno 18] leads out of the volume"),
        (in_file("v", "f", "NONE"), 'environment variable key "NONE" not found in file "f"'),
    ],
)
async def test_start_container_unusable_env_file_raises_config_error(
    tmp_path: Path, wish: dict[str, Any], message: str
) -> None:
    volume = tmp_path / "volume"
    volume.mkdir()
    (volume / "f").write_text("K='v'\n")
    (volume / "out").symlink_to("/etc/passwd")
    failure = await Started(tmp_path, Objects(), {}).failure(env(wish), v=volume)
    assert failure.message == message
    assert {path.name for path in volume.iterdir()} == {"f", "out"}


async def test_gather_env_sources_file_of_spaces_takes_linear_time(tmp_path: Path) -> None:
    """Verify that the largest file of spaces, which had frozen the kubelet for hours, is rejected quickly."""
    # The last byte matters: a file of nothing but spaces is blank for any parser.
    (tmp_path / "spaces").write_bytes(b" " * ((1 << 20) - 1) + b"x")
    (tmp_path / "blank").write_bytes(b" \n" * (1 << 19))
    paths = ("spaces", "blank")
    container = env(*(in_file("v", path, f"K{n}") for path in paths for n in range(100)))
    volumes = {"v": MountedVolume(str(tmp_path))}
    began = time.process_time()
    sources = await gather_env_sources(Objects(), make_pod(container), container, volumes)
    for number in range(100):
        with pytest.raises(ValueError, match=r"line 1 of the environment file .*at most 65535 bytes"):
            sources.file_value("v", "spaces", f"K{number}")
        assert sources.file_value("v", "blank", f"K{number}") == ""
    assert time.process_time() - began < 5


async def test_gather_env_sources_files_parsed_once_off_event_loop(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Verify that a container start parses each file once, in another thread, and bounds their sum."""
    parsed: list[tuple[threading.Thread, set[str]]] = []

    def parse(data: bytes, keys: Collection[str]) -> EnvFile:
        parsed.append((threading.current_thread(), set(keys)))
        return parse_env_file(data, keys)

    monkeypatch.setattr(env_sources, "parse_env_file", parse)
    monkeypatch.setattr(env_sources, "MAX_FILES_BYTES", 20)
    for name in ("a", "b", "c"):
        (tmp_path / name).write_bytes(b"K='v'\nL='w'\n")
    container = env(*(in_file("v", path, key) for path in ("a", "b", "c") for key in ("K", "L", "M")))
    volumes = {"v": MountedVolume(str(tmp_path))}
    sources = await gather_env_sources(Objects(), make_pod(container), container, volumes)
    assert [keys for _, keys in parsed] == [{"K", "L", "M"}] * 2
    assert threading.current_thread() not in [thread for thread, _ in parsed]
    assert [sources.file_value("v", "b", key) for key in ("K", "L", "M")] == ["v", "w", ""]
    with pytest.raises(ValueError, match="environment files have 20 bytes or more"):
        sources.file_value("v", "c", "K")


async def test_gather_env_sources_many_containers_files_parsed_sequentially(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Verify that the parsers of many containers do not compete with the event loop for the interpreter."""
    running, most = 0, 0

    def parse(data: bytes, keys: Collection[str]) -> EnvFile:
        nonlocal running, most
        running += 1
        most = max(most, running)
        time.sleep(0.02)
        running -= 1
        return parse_env_file(data, keys)

    monkeypatch.setattr(env_sources, "parse_env_file", parse)
    (tmp_path / "a").write_bytes(b"K='v'\n")
    container = env(in_file("v", "a", "K"))
    volumes = {"v": MountedVolume(str(tmp_path))}
    pod = make_pod(container)
    found = await asyncio.gather(*(gather_env_sources(Objects(), pod, container, volumes) for _ in range(10)))
    assert [sources.file_value("v", "a", "K") for sources in found] == ["v"] * 10
    assert most == 1
