"""Whole pods through the real engine, with a runtime and an API server in memory, by loop time."""

import asyncio
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from pykubelet.api.pod import Container
from pykubelet.config.feature_gates import FeatureGates
from pykubelet.linux.cgroupfs import Cgroups
from pykubelet.podconfig.ephemeral_containers import EphemeralContainerRejected
from pykubelet.podsync.syncer import NodePodSyncer
from pykubelet.transport.errors import CriError, NotFound, Unavailable
from pykubelet.volumes.errors import VolumeError
from tests.support.pods import make_pod
from tests.unit.cm.test_cgroup_v2 import v2
from tests.unit.podworkers.scripted_node import UID, ScriptedNode, container
from tests.unit.podworkers.test_cost_per_pod import cgroups

__all__ = ["cgroups", "v2"]

pytestmark = pytest.mark.looptime


@pytest.fixture
async def node(tmp_path: Path, cgroups: Cgroups) -> ScriptedNode:
    return ScriptedNode(tmp_path / "root", cgroups)


async def test_engine_init_containers_start_in_order_before_main_containers(node: ScriptedNode) -> None:
    node.runtime.exits |= {"first": [(1, 0)], "second": [(1, 0)]}
    async with node.running():
        node.api.put(
            initContainers=[container("first"), container("second")],
            containers=[container("main"), container("other")],
        )
        await node.until(lambda: node.api.pods["web"]["status"]["phase"] == "Running")
        started = [call for call in node.runtime.log if call.startswith(("run", "start"))]
        assert started == ["run sandbox 0", "start first", "start second", "start main", "start other"]
        assert node.images.pulls == ["busybox:latest"]
        assert node.api.condition("Initialized") == "True"
        assert node.api.condition("Ready") == "True"
        await asyncio.sleep(60)
    reasons = [reason for reason, _ in node.api.recorded]
    assert reasons.count("Started") == 4


async def test_engine_init_container_fails_policy_never_pod_fails(node: ScriptedNode) -> None:
    node.runtime.exits |= {"first": [(1, 3)]}
    async with node.running():
        node.api.put(
            restartPolicy="Never",
            initContainers=[container("first"), container("second")],
            containers=[container("main")],
        )
        await node.until(lambda: node.api.status()["phase"] == "Failed")
        await asyncio.sleep(120)
        assert [call for call in node.runtime.log if call.startswith("start")] == ["start first"]
        assert node.api.condition("Initialized") == "False"
        first = node.api.container("first", key="initContainerStatuses")
        assert first["state"]["terminated"]["exitCode"] == 3
        assert node.api.container("main")["state"]["waiting"]["reason"] == "PodInitializing"


async def test_engine_init_container_create_fails_main_containers_wait(node: ScriptedNode) -> None:
    node.runtime.failures["create first"] = [CriError("CreateContainer", "Unknown", "no such device")] * 2
    node.runtime.exits |= {"first": [(1, 0)]}
    async with node.running():
        node.api.put(initContainers=[container("first")], containers=[container("main")])
        await node.until(lambda: node.runtime.log.count("create first") == 2)
        assert "create main" not in node.runtime.log
        await node.until(lambda: node.api.status()["phase"] == "Running")
        assert node.runtime.log.count("create first") == 3
        assert node.runtime.log.index("start first") < node.runtime.log.index("create main")
        await asyncio.sleep(30)
    assert any(reason == "Failed" and "no such device" in text for reason, text in node.api.recorded)


async def test_engine_ephemeral_container_rejected_on_a_node_with_an_api_server(node: ScriptedNode) -> None:
    async with node.running() as rig:
        node.api.put(containers=[container("main")])
        await node.until(lambda: node.api.pods["web"]["status"].get("phase") == "Running")
        with pytest.raises(EphemeralContainerRejected, match="kubectl debug"):
            rig.engine.add_ephemeral_container(UID, Container(name="d", image="i"))
        with pytest.raises(LookupError):
            rig.engine.add_ephemeral_container("other", Container(name="d", image="i"))


async def test_engine_crashing_container_restarted_with_exponential_back_off(node: ScriptedNode) -> None:
    node.runtime.exits["main"] = [(1, 1)] * 4
    async with node.running():
        node.api.put(containers=[container()])
        clock, moments = asyncio.get_running_loop().time, list[float]()
        while len(moments) < 5:
            await node.until(lambda: node.runtime.log.count("start main") > len(moments))
            moments.append(clock())
        # Each run takes a second.
        pauses = [after - before - 1 for before, after in pairwise(moments)]
        assert [round(pause) for pause in pauses] == [0, 10, 20, 40]
        await asyncio.sleep(10)
        status = node.api.container("main")
        assert (status["restartCount"], status["lastState"]["terminated"]["exitCode"]) == (4, 1)
        assert "running" in status["state"]
        node.runtime.exit("main", 1)
        await node.until(lambda: node.api.waiting() == "CrashLoopBackOff", 79)
        message = node.api.container("main")["state"]["waiting"]["message"]
        assert message.startswith("back-off 1m20s restarting failed container=main pod=web_default(")
    assert any(reason == "BackOff" for reason, _ in node.api.recorded)


@pytest.mark.parametrize(
    ("policy", "code", "phase"),
    [
        ("Never", 0, "Succeeded"),
        ("Never", 1, "Failed"),
        ("OnFailure", 0, "Succeeded"),
        ("Always", 0, "Running"),
    ],
)
async def test_engine_container_exits_phase_follows_restart_policy(
    node: ScriptedNode, policy: str, code: int, phase: str
) -> None:
    node.runtime.exits["main"] = [(5, code)]
    async with node.running():
        node.api.put(restartPolicy=policy, containers=[container()])
        await node.until(lambda: node.runtime.names() == ["main"])
        await asyncio.sleep(60)
        assert node.api.status()["phase"] == phase
        assert node.runtime.log.count("start main") == (2 if policy == "Always" else 1)
        if policy != "Always":
            assert node.volumes.log[-1] == "unmount"
            assert node.objects.log == ["register web", "unregister"]
            # The sandbox goes, the container stays for its log until the pod is deleted.
            assert "stop sandbox" in node.runtime.log
            assert node.runtime.names(running=False) == ["main"]
            node.api.delete_pod()
            await node.until(lambda: not node.api.pods and node.runtime.is_empty)


async def test_engine_deleted_pod_is_stopped_reported_and_removed(node: ScriptedNode) -> None:
    async with node.running() as rig:
        node.api.put(
            containers=[container("main"), container("other")], volumes=[{"name": "v", "emptyDir": {}}]
        )
        await node.until(lambda: node.api.status()["phase"] == "Running")
        directory = next((node.root / "pods").iterdir())
        node.runtime.log.clear()
        node.api.delete_pod(grace=7)
        await node.until(lambda: not node.api.pods)
        assert sorted(node.runtime.log[:2]) == ["stop main 7", "stop other 7"]
        assert node.runtime.log[2] == "stop sandbox"
        assert sorted(node.runtime.log[3:]) == ["remove main", "remove other", "remove sandbox"]
        assert (node.volumes.log, node.objects.log) == (["mount", "unmount"], ["register web", "unregister"])
        await node.until(lambda: not len(rig.engine.workers))
        assert not directory.exists()
        assert rig.engine.statuses.get(directory.name) is None


async def test_engine_force_deleted_pod_leaves_nothing(node: ScriptedNode) -> None:
    async with node.running() as rig:
        node.api.put(containers=[container()])
        await node.until(lambda: node.api.status()["phase"] == "Running")
        node.api.drop()
        await node.until(lambda: node.runtime.is_empty and not len(rig.engine.workers))
        assert not list((node.root / "pods").iterdir())
        assert node.objects.log[-1] == "unregister"


async def test_engine_orphan_untouched_until_all_sources_have_reported(node: ScriptedNode) -> None:
    async with node.running():
        node.api.put(containers=[container()])
        await node.until(lambda: node.api.status()["phase"] == "Running")
    node.api.drop()
    node.api.may_list.clear()
    node.runtime.log.clear()
    task = asyncio.ensure_future(_run_for(node, 300))
    await asyncio.sleep(200)
    # Nothing is unwanted before the API server has said which pods it wants.
    assert (node.runtime.log, node.runtime.names()) == ([], ["main"])
    node.api.may_list.set()
    await node.until(lambda: node.runtime.is_empty)
    assert "stop main 30" in node.runtime.log
    task.cancel()
    await asyncio.wait([task])


async def _run_for(node: ScriptedNode, seconds: float) -> None:
    async with node.running():
        await asyncio.sleep(seconds)


async def test_engine_kubelet_restarted_containers_untouched(node: ScriptedNode) -> None:
    async with node.running():
        node.api.put(containers=[container()])
        await node.until(lambda: node.api.status()["phase"] == "Running")
        before = node.api.container("main")["containerID"]
    node.runtime.log.clear()
    async with node.running() as rig:
        await asyncio.sleep(120)
        assert node.runtime.log == []
        assert node.api.container("main")["containerID"] == before
        assert [pod.metadata.name for pod in rig.engine.pods()] == ["web"]
        assert node.api.condition("Ready") == "True"


async def test_engine_liveness_probe_fails_restarts_container(node: ScriptedNode) -> None:
    node.runtime.commands["check"] = lambda: int("start main" in node.runtime.log)
    probe = {"exec": {"command": ["check"]}, "periodSeconds": 5, "failureThreshold": 2}
    async with node.running():
        node.api.put(containers=[container(livenessProbe=probe)], terminationGracePeriodSeconds=9)
        took = await node.until(lambda: "stop main 9" in node.runtime.log)
        assert 5 <= took < 20
        node.runtime.commands["check"] = lambda: 0
        await node.until(lambda: node.api.container("main")["restartCount"] == 1)
        await asyncio.sleep(60)
        assert node.runtime.log.count("start main") == 2
    reasons = [reason for reason, _ in node.api.recorded]
    assert "Unhealthy" in reasons
    assert ("Killing", "Container main failed liveness probe, will be restarted") in node.api.recorded


async def test_engine_readiness_and_startup_probes_set_ready_and_started(node: ScriptedNode) -> None:
    codes = {"ready": 1, "up": 1}
    node.runtime.commands |= {"ready": lambda: codes["ready"], "up": lambda: codes["up"]}
    times = {"periodSeconds": 2, "timeoutSeconds": 1, "successThreshold": 1, "failureThreshold": 100}
    probes: dict[str, Any] = {
        "readinessProbe": {"exec": {"command": ["ready"]}} | times | {"failureThreshold": 3},
        "startupProbe": {"exec": {"command": ["up"]}} | times,
    }
    async with node.running():
        node.api.put(containers=[container(**probes)])
        await node.until(lambda: node.api.status()["phase"] == "Running")
        await asyncio.sleep(10)
        assert (node.api.container("main")["started"], node.api.condition("Ready")) == (False, "False")
        codes["up"] = 0
        await node.until(lambda: node.api.container("main")["started"], 10)
        await asyncio.sleep(10)
        assert node.api.condition("Ready") == "False"
        codes["ready"] = 0
        await node.until(lambda: node.api.condition("Ready") == "True", 10)
        assert node.api.condition("ContainersReady") == "True"
        codes["ready"] = 1
        await node.until(lambda: node.api.condition("Ready") == "False", 20)
        assert "stop main 30" not in node.runtime.log


async def test_engine_post_start_hook_fails_kills_container(node: ScriptedNode) -> None:
    codes = [1, 0]
    node.runtime.commands["hook"] = lambda: codes.pop(0)
    hook = {"postStart": {"exec": {"command": ["hook"]}}}
    async with node.running():
        node.api.put(containers=[container(lifecycle=hook)])
        await node.until(lambda: node.runtime.log.count("start main") == 2)
        log = [call for call in node.runtime.log if "main" in call]
        assert log[:4] == ["create main", "start main", "stop main 30", "create main"]
        await asyncio.sleep(30)
    assert any(reason == "FailedPostStartHook" for reason, _ in node.api.recorded)


async def test_engine_post_start_hook_fails_sets_waiting_message(node: ScriptedNode) -> None:
    node.runtime.commands["hook"] = lambda: 1
    hook = {"postStart": {"exec": {"command": ["hook", "now"]}}}
    async with node.running():
        node.api.put(containers=[container(lifecycle=hook)])
        await node.until(lambda: node.api.waiting() == "PostStartHookError")
        assert node.api.container("main")["state"]["waiting"]["message"] == (
            f'Exec lifecycle hook ([hook now]) for Container "main" in Pod "web_default({UID})" failed - '
            "error: command 'hook now' exited with 1: , message: \"out\""
        )


async def test_engine_sandbox_lost_recreates_sandbox_and_containers(node: ScriptedNode) -> None:
    node.runtime.exits["init"] = [(1, 0), (1, 0)]
    async with node.running():
        node.api.put(initContainers=[container("init")], containers=[container("main")])
        await node.until(lambda: node.api.status()["phase"] == "Running")
        node.runtime.log.clear()
        node.runtime.lose_sandboxes()
        await node.until(lambda: "start main" in node.runtime.log)
        started = [call for call in node.runtime.log if call.startswith(("run", "start"))]
        assert started == ["run sandbox 1", "start init", "start main"]
        await asyncio.sleep(20)
        assert node.api.container("main")["restartCount"] == 1
    assert ("SandboxChanged", "Pod sandbox changed, it will be killed and re-created.") in node.api.recorded


async def test_engine_sandbox_lost_policy_never_stopped_once(node: ScriptedNode) -> None:
    """Verify that a pod whose containers may restart, but not in a new sandbox, is not synced in a loop."""
    async with node.running():
        containers = [{**container("main"), "restartPolicy": "Always"}]
        node.api.put(restartPolicy="Never", containers=containers)
        await node.until(lambda: node.api.status()["phase"] == "Running")
        node.runtime.lose_sandboxes()
        await asyncio.sleep(50)
        assert 1 <= node.runtime.log.count("stop sandbox") <= 3
        assert node.runtime.log.count("start main") == 1


async def test_engine_run_pod_sandbox_fails_is_retried(node: ScriptedNode) -> None:
    failure = CriError("RunPodSandbox", "Unknown", "cni: no address")
    node.runtime.failures["run sandbox 0"] = [failure] * 2
    async with node.running():
        node.api.put(containers=[container()])
        await node.until(lambda: node.api.status()["phase"] == "Running")
        assert node.runtime.log.count("run sandbox 0") == 3
        await asyncio.sleep(30)
    assert any(r == "FailedCreatePodSandBox" and "cni: no address" in text for r, text in node.api.recorded)


async def test_engine_network_not_ready_only_host_network_pods_start(node: ScriptedNode) -> None:
    node.network_errors.append("cni plugin not initialized")
    async with node.running() as rig:
        node.api.put("own", hostNetwork=True, containers=[container()])
        node.api.put("web", uid="00000000-0000-0000-0000-00000000bbbb", containers=[container("other")])
        await node.until(lambda: node.api.status("own")["phase"] == "Running")
        await asyncio.sleep(60)
        assert node.runtime.names() == ["main"]
        node.network_errors.clear()
        await node.until(lambda: sorted(node.runtime.names()) == ["main", "other"])
        assert len(rig.engine.workers) == 2
        await asyncio.sleep(30)
    assert any(reason == "NetworkNotReady" for reason, _ in node.api.recorded)


async def test_engine_image_pull_fails_is_retried(node: ScriptedNode) -> None:
    node.images.failures = [NotFound("PullImage", "NotFound", "no such image")] * 2
    async with node.running():
        node.api.put(containers=[container()])
        await node.until(lambda: node.api.waiting() == "ErrImagePull")
        await node.until(lambda: node.api.waiting() == "ImagePullBackOff")
        assert "create main" not in node.runtime.log
        await node.until(lambda: node.api.status()["phase"] == "Running")
        assert len(node.images.pulls) == 3
        await asyncio.sleep(30)
    reasons = [reason for reason, _ in node.api.recorded]
    assert {"Failed", "BackOff", "Pulled"} <= set(reasons)


async def test_engine_image_pull_policy_never_is_not_pulled(node: ScriptedNode) -> None:
    async with node.running():
        node.api.put(containers=[container(imagePullPolicy="Never")])
        await node.until(
            lambda: (
                node.api.status().get("containerStatuses")
                and node.api.container("main")["state"]["waiting"]["reason"] == "ErrImageNeverPull"
            )
        )
        assert node.images.pulls == []
        await asyncio.sleep(30)


async def test_engine_sidecar_starts_before_and_stops_after_main_containers(node: ScriptedNode) -> None:
    async with node.running():
        node.api.put(
            initContainers=[container("side", restartPolicy="Always"), container("init")],
            containers=[container("main")],
        )
        await node.until(lambda: "start init" in node.runtime.log)
        assert node.runtime.log.index("start side") < node.runtime.log.index("create init")
        node.runtime.exit("init")
        await node.until(lambda: node.api.status()["phase"] == "Running")
        node.runtime.exit("side", 1)
        await node.until(lambda: node.runtime.log.count("start side") == 2)
        node.runtime.log.clear()
        node.api.delete_pod()
        await node.until(lambda: not node.api.pods)
        stops = [call.split()[1] for call in node.runtime.log if call.startswith("stop")]
        assert stops == ["main", "side", "sandbox"]


async def test_engine_restart_named_container_restarts_only_it(node: ScriptedNode) -> None:
    async with node.running() as rig:
        node.api.put(containers=[container("main"), container("other")])
        await node.until(lambda: node.api.status()["phase"] == "Running")
        uid = node.api.pods["web"]["metadata"]["uid"]
        node.runtime.log.clear()
        assert rig.engine.restart(uid, "main") == ["main"]
        await node.until(
            lambda: sorted(node.runtime.names()) == ["main", "other"] and "start main" in node.runtime.log
        )
        assert node.runtime.log[:3] == ["stop main 30", "create main", "start main"]
        await asyncio.sleep(5)
        assert node.api.container("main")["restartCount"] == 1
        assert node.api.container("other")["restartCount"] == 0
        with pytest.raises(LookupError, match="no container ghost"):
            rig.engine.restart(uid, "ghost")
        with pytest.raises(LookupError, match="no pod"):
            rig.engine.restart("nobody", None)


async def test_engine_image_changed_restarts_container(node: ScriptedNode) -> None:
    async with node.running():
        node.api.put(containers=[container("main"), container("other")])
        await node.until(lambda: node.api.status()["phase"] == "Running")
        node.runtime.log.clear()
        node.api.put(containers=[container("main", image="busybox:2"), container("other")])
        await node.until(lambda: "start main" in node.runtime.log)
        assert node.runtime.log == ["stop main 30", "create main", "start main"]
        await asyncio.sleep(60)
        assert node.runtime.log == ["stop main 30", "create main", "start main"]
        assert node.objects.log == ["register web"] * 2
    assert any(r == "Killing" and "definition changed" in text for r, text in node.api.recorded)


async def test_engine_idle_pod_volumes_refreshed_each_minute(node: ScriptedNode) -> None:
    async with node.running():
        node.api.put(containers=[container()], volumes=[{"name": "v", "configMap": {"name": "c"}}])
        await node.until(lambda: node.api.status()["phase"] == "Running")
        before = node.volumes.log.count("refresh")
        await asyncio.sleep(200)
        assert 3 <= node.volumes.log.count("refresh") - before <= 5
        node.volumes.failures["refresh"] = [VolumeError("configMap gone")]
        await node.until(lambda: not node.volumes.failures["refresh"], 90)
        count = node.volumes.log.count("refresh")
        # What failed is tried again sooner.
        await node.until(lambda: node.volumes.log.count("refresh") > count, 20)
        await asyncio.sleep(30)
    assert ("FailedMount", "configMap gone") in node.api.recorded


async def test_engine_mount_fails_pod_waits_and_mount_is_retried(node: ScriptedNode) -> None:
    node.volumes.failures["mount"] = [VolumeError("no such disk")] * 2
    async with node.running():
        node.api.put(containers=[container()], volumes=[{"name": "v", "emptyDir": {}}])
        await node.until(lambda: node.api.status()["phase"] == "Running")
        assert node.volumes.log[:3] == ["mount"] * 3
        await asyncio.sleep(30)
    assert ("FailedMount", "no such disk") in node.api.recorded


async def test_engine_unmount_fails_is_retried_before_pod_deletion(node: ScriptedNode) -> None:
    node.volumes.failures["unmount"] = [VolumeError("busy")]
    async with node.running():
        node.api.put(containers=[container()], volumes=[{"name": "v", "emptyDir": {}}])
        await node.until(lambda: node.api.status()["phase"] == "Running")
        node.api.delete_pod(grace=1)
        await node.until(lambda: not node.api.pods)
        assert node.volumes.log.count("unmount") == 2
        await asyncio.sleep(30)
    assert any(reason == "FailedUnMount" for reason, _ in node.api.recorded)


async def test_engine_stop_container_fails_is_retried(node: ScriptedNode) -> None:
    node.runtime.failures["stop main 5"] = [Unavailable("StopContainer", "Unavailable", "away")]
    async with node.running():
        node.api.put(containers=[container()])
        await node.until(lambda: node.api.status()["phase"] == "Running")
        node.api.delete_pod(grace=5)
        await node.until(lambda: not node.api.pods)
        assert node.runtime.log.count("stop main 5") == 2
        assert node.runtime.is_empty
        await asyncio.sleep(30)
    assert any(reason == "FailedKillPod" for reason, _ in node.api.recorded)


async def test_engine_active_deadline_exceeded_pod_fails(node: ScriptedNode) -> None:
    async with node.running():
        node.api.put(activeDeadlineSeconds=20, restartPolicy="Never", containers=[container()])
        await node.until(lambda: node.api.status()["phase"] == "Running")
        took = await node.until(lambda: node.api.status()["phase"] == "Failed")
        assert 18 <= took <= 24
        assert node.api.status()["reason"] == "DeadlineExceeded"
        assert node.runtime.names() == []


@pytest.mark.parametrize("gate", [True, False])
async def test_engine_init_containers_rerun_initialized_follows_feature_gate(
    node: ScriptedNode, gate: bool
) -> None:
    """Verify that a rerun takes `Initialized` back without RestartAllContainersOnContainerExits only."""
    node.gates = FeatureGates().with_overrides({"RestartAllContainersOnContainerExits": gate})
    node.runtime.exits["first"] = [(1, 0), (30, 0)]
    async with node.running():
        node.api.put(initContainers=[container("first")], containers=[container("main")])
        await node.until(lambda: node.api.status()["phase"] == "Running")
        assert node.api.condition("Initialized") == "True"
        # A regular container that is still known as terminated keeps the condition, as upstream.
        node.runtime.lose_everything()
        await node.until(lambda: node.runtime.log.count("start first") == 2)
        await asyncio.sleep(10)
        assert node.api.condition("Initialized") == ("True" if gate else "False")
        await node.until(lambda: node.runtime.log.count("start main") == 2)
        await node.until(lambda: node.api.condition("Initialized") == "True")


@pytest.mark.parametrize("gate", [True, False])
async def test_engine_container_restart_policy_only_with_gate(node: ScriptedNode, gate: bool) -> None:
    overrides = {"ContainerRestartRules": gate, "RestartAllContainersOnContainerExits": gate}
    node.gates = FeatureGates().with_overrides(overrides)
    assert not node.gates.problems
    node.runtime.exits["main"] = [(1, 1)]
    async with node.running():
        node.api.put(restartPolicy="Never", containers=[{**container("main"), "restartPolicy": "Always"}])
        if gate:
            await node.until(lambda: node.runtime.log.count("start main") == 2)
            await node.until(lambda: node.api.status()["phase"] == "Running")
        else:
            await node.until(lambda: node.api.status()["phase"] == "Failed")
            await asyncio.sleep(120)
            assert node.runtime.log.count("start main") == 1


@pytest.mark.parametrize("gate", [True, False])
@pytest.mark.parametrize("policy", ["Never", "OnFailure", "Always"])
async def test_engine_same_pod_added_again_while_terminating_runs_again(
    node: ScriptedNode, policy: str, gate: bool
) -> None:
    """Verify that exited containers are retained only where they are restarted in a new sandbox."""
    overrides = {"ContainerRestartRules": gate, "RestartAllContainersOnContainerExits": gate}
    node.gates = FeatureGates().with_overrides(overrides)
    spec: dict[str, Any] = {
        "restartPolicy": policy,
        "containers": [{**container("main"), "restartPolicy": "Always"}],
    }
    async with node.running():
        node.api.put(**spec)
        await node.until(lambda: node.api.status()["phase"] == "Running")
        node.api.drop()
        await node.until(lambda: "stop main 30" in node.runtime.log)
        node.api.put(**spec)
        await node.until(lambda: node.runtime.log.count("start main") == 2)
        await node.until(lambda: node.api.status()["phase"] == "Running")
        retained = policy == "Always" or (policy == "OnFailure" and gate)
        assert node.api.container("main")["restartCount"] == (1 if retained else 0)


@pytest.mark.parametrize("gate", [True, False])
async def test_engine_condition_ready_to_start_only_with_gate(node: ScriptedNode, gate: bool) -> None:
    node.gates = FeatureGates().with_overrides({"PodReadyToStartContainersCondition": gate})
    async with node.running():
        node.api.put(containers=[container("main")])
        await node.until(lambda: node.api.status()["phase"] == "Running")
        found = {condition["type"] for condition in node.api.status()["conditions"]}
        assert ("PodReadyToStartContainers" in found) == gate
        assert "Ready" in found


@pytest.mark.parametrize("gate", [True, False])
async def test_engine_relists_rarely_only_with_gate(node: ScriptedNode, gate: bool) -> None:
    node.gates = FeatureGates().with_overrides({"PLEGOnDemandRelist": gate})
    async with node.running() as rig:
        assert rig.engine.pleg._on_demand == gate


@pytest.mark.parametrize("gate", [True, False])
async def test_engine_probe_results_of_earlier_process_dropped_only_with_gate(
    node: ScriptedNode, gate: bool
) -> None:
    node.gates = FeatureGates().with_overrides({"ChangeContainerStatusOnKubeletRestart": gate})
    async with node.running() as rig:
        assert isinstance(rig.engine.syncer, NodePodSyncer)
        assert rig.engine.syncer._prober._restores != gate


async def test_engine_duplicate_pod_name_recorded_as_event(node: ScriptedNode) -> None:
    async with node.running() as rig:
        first, second = make_pod(uid="u1"), make_pod(uid="u2")
        rig.engine.records.mux.set("file", [first, second])
        await node.until(lambda: node.api.recorded)
        await asyncio.sleep(1)
    assert node.api.recorded == [
        (
            "FailedValidation",
            'Error validating pod web_default(u2) from file due to duplicate pod name "web", ignoring',
        )
    ]
