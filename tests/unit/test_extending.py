"""The package of docs/extending.md, installed, and found by the kubelet's own discovery."""

import asyncio
import os
import re
import sys
import time
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry

from pykubelet.admission.handler import AdmitRejection, DeferredResult
from pykubelet.admission.handler_chain import make_chain
from pykubelet.api.meta import ObjectMeta
from pykubelet.api.pod import Container, ExecAction, Pod, PodSpec, Probe
from pykubelet.api.volume import Volume
from pykubelet.eviction.custom_ranking import installed_ranking
from pykubelet.eviction.ranking import rank
from pykubelet.eviction.signals import Disks
from pykubelet.images.credential_provider import ProviderPlugins
from pykubelet.images.metrics import ImageMetrics
from pykubelet.images.python_providers import installed_providers
from pykubelet.probes.custom import installed_probes, selected_handler
from pykubelet.probes.runner import Checker, ExecSlots
from pykubelet.probes.types import Target
from pykubelet.util.tasks import TaskScope
from pykubelet.volumes.plugin import MemoryLimits, VolumeHost, VolumeToMount
from pykubelet.volumes.registry import load_plugins
from tests.support.admission import attempt, surroundings
from tests.support.eviction import pod as eviction_pod
from tests.support.eviction import usage
from tests.support.probes import no_exec
from tests.support.volumes import Node, Shelf

PAGE = (Path(__file__).parents[2] / "docs" / "extending.md").read_text()
POD = Pod(metadata=ObjectMeta(name="web", namespace="ns", uid="u1"), spec=PodSpec())


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The package as pip installs it: the module, and next to it the metadata with the entry points."""
    site = tmp_path / "site"
    site.mkdir()
    (site / "acme_node.py").write_text("\n\n".join(blocks("python")))
    (project,) = map(tomllib.loads, blocks("toml"))
    name, version = project["project"]["name"], project["project"]["version"]
    info = site / f"{name.replace('-', '_')}-{version}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    groups = project["project"]["entry-points"]
    (info / "entry_points.txt").write_text(
        "\n".join(
            f"[{group}]\n" + "".join(f"{entry} = {value}\n" for entry, value in entries.items())
            for group, entries in groups.items()
        )
    )
    monkeypatch.setattr(sys, "path", [*sys.path, str(site)])
    yield site
    sys.modules.pop("acme_node", None)


async def test_extending_page_volume_plugin_sets_up_volume(package: Path, tmp_path: Path) -> None:
    host = VolumeHost(tmp_path, Shelf(), Node(), MemoryLimits(lambda pod: None, 1))
    plugin = load_plugins(host)["glusterfs"]
    mounted = await plugin.set_up(VolumeToMount(POD, Volume(name="disk"), "glusterfs", {}, "disk"))
    assert Path(mounted.path) == tmp_path / "pods/u1/volumes/acme.example~scratch/disk"
    assert Path(mounted.path).is_dir()


async def test_extending_page_admission_handler_rejects_pod(package: Path) -> None:
    chain = make_chain(surroundings())
    labelled = Pod(metadata=ObjectMeta(name="web", namespace="ns", uid="u2", labels={"team": "red"}))
    deferred = chain.admit(attempt(POD))
    assert isinstance(deferred, DeferredResult)
    rejection = await deferred.result()
    assert isinstance(rejection, AdmitRejection)
    assert rejection.reason == "NoTeam"
    deferred = chain.admit(attempt(labelled))
    assert isinstance(deferred, DeferredResult)
    assert await deferred.result() is None


@pytest.mark.parametrize(("age", "expected"), [(1, "success"), (600, "failure")])
async def test_extending_page_probe_selected_by_annotation(
    package: Path, tmp_path: Path, age: int, expected: str
) -> None:
    heartbeat = tmp_path / "heartbeat"
    heartbeat.touch()
    os.utime(heartbeat, (time.time() - age, time.time() - age))
    pod = Pod(metadata=ObjectMeta(annotations={"liveness.probes.pykubelet.dev/worker": "file-age"}))
    probe = Probe(exec=ExecAction(command=[str(heartbeat), "60"]), timeout_seconds=30)
    custom = selected_handler(pod, "worker", "liveness", probe)
    checker = Checker(no_exec, ExecSlots(1), installed_probes())
    outcome = await checker.check(probe, Target(Container(name="worker"), "c1", "127.0.0.1", custom))
    assert (outcome.result, outcome.errored) == (expected, False)
    assert str(heartbeat) in outcome.output


async def test_extending_page_eviction_ranking_decides(package: Path) -> None:
    pods = [eviction_pod("web"), eviction_pod("job")]
    pods[1].metadata.labels["workload"] = "batch"
    ranked = rank("memory.available", pods, {"web": usage("3Mi"), "job": usage("1Mi")}, Disks())
    assert [found.pod.metadata.name for found in ranked] == ["web", "job"]
    ranking = installed_ranking()
    assert ranking is not None
    ordered = await ranking.order("memory.available", ranked)
    assert [found.pod.metadata.name for found in ordered] == ["job", "web"]


async def test_extending_page_credentials_used_for_registry(
    package: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    token = tmp_path / "registry-token"
    token.write_text("s3cret\n")
    module = package / "acme_node.py"
    module.write_text(module.read_text().replace("/etc/acme/registry-token", str(token)))
    async with TaskScope() as tasks:
        plugins = ProviderPlugins(
            (), tmp_path, tasks, ImageMetrics(CollectorRegistry()), None, installed_providers(tasks)
        )
        result = await asyncio.wait_for(plugins.lookup("registry.acme.example/team/app", POD), 30)
        elsewhere = await plugins.lookup("docker.io/library/busybox", POD)
    assert [(login.username, login.password) for login in result.credentials] == [("node", "s3cret")]
    assert (result.failures, elsewhere.credentials, elsewhere.failures) == ([], [], [])


async def test_installed_providers_without_packages_are_none() -> None:
    async with TaskScope() as tasks:
        assert installed_providers(tasks) == []
    assert installed_ranking() is None
