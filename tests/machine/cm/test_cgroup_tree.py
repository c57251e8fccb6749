"""Cgroups of pods on the real hierarchies of v1, and what is refused before any is made."""

import asyncio
import csv
import re
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest
import yaml

from pykubelet.api.meta import from_document
from pykubelet.api.pod import Pod
from pykubelet.cm.cgroups import driver as cgroup_files
from pykubelet.cm.cgroups import node_cgroups
from pykubelet.cm.cgroups.driver import CgroupFiles, CgroupWriteError
from pykubelet.cm.cgroups.pod_cgroups import REWRITE_SECONDS, PodCgroups
from pykubelet.cm.cgroups.values import CgroupValues
from pykubelet.config.feature_gates import FeatureGates
from pykubelet.config.types import KubeletConfiguration
from pykubelet.linux import cgroupfs as cgroup_tree
from pykubelet.linux import systemd
from pykubelet.linux.cgroupfs import CgroupMode, Cgroups, detect_cgroups
from pykubelet.podconfig.defaults import apply_defaults
from tests.support.cgroups import CAPACITY, NO_LIMIT, needs_v1, process_in, root, value
from tests.support.pod_resources import pod_of

__all__ = ["root"]

GOLDEN = Path(__file__).parents[2] / "data/golden"
TIERS = ("/burstable", "/besteffort")


def pods_in(root: str, **config: Any) -> PodCgroups:
    settings = KubeletConfiguration(cgroup_root=root, **config)
    return PodCgroups(settings, FeatureGates(), detect_cgroups(), CAPACITY)


def golden_pods() -> list[Pod]:
    documents = list(yaml.safe_load_all((GOLDEN / "given-basic.yaml").read_text()))
    web = {"name": "web", "resources": {"requests": {"cpu": "10m"}}}
    documents.append({"metadata": {"name": "static-web"}, "spec": {"containers": [web]}})
    pods = [from_document(Pod, document) for document in documents]
    for pod in pods:
        pod.metadata.uid = f"0-{pod.metadata.name}"
        apply_defaults(pod)
    return pods


@pytest.mark.machine
@needs_v1
class TestV1:
    async def test_pod_cgroups_values_equal_upstream(self, root: str) -> None:
        """The same pods give the values that were recorded of the reference."""
        cgroups = pods_in(root)
        await cgroups.setup()
        pods = golden_pods()
        await cgroups.update_qos([])
        parents = {await cgroups.ensure(pod) for pod in pods}
        assert parents == {
            f"{root}/kubepods/besteffort/pod0-besteffort",
            f"{root}/kubepods/burstable/pod0-burstable",
            f"{root}/kubepods/burstable/pod0-static-web",
            f"{root}/kubepods/pod0-guaranteed",
        }
        with (GOLDEN / "cgroups-v1.tsv").open() as file:
            rows = [row for row in csv.DictReader(file, delimiter="\t") if "<container" not in row["cgroup"]]
        differences = []
        for row in rows:
            cgroup = re.sub(r"<uid of (.*)>", r"0-\1", row["cgroup"])
            expected = row["value"] if row["controller"] != "cpuset" else value("cpuset", "/", row["file"])
            actual = value(row["controller"], f"{root}/{cgroup}", row["file"])
            if actual != expected:
                differences.append((cgroup, row["file"], expected, actual))
        assert differences == []
        assert len(rows) > 30
        assert cgroups.uids() == {pod.uid for pod in pods}

    async def test_pod_cgroups_created_and_removed_in_every_hierarchy(self, root: str) -> None:
        cgroups, pod = pods_in(root), pod_of({"requests": {"cpu": "1"}})
        await cgroups.setup()
        parent = await cgroups.ensure(pod)
        folders = {detect_cgroups().path(controller, parent) for controller in detect_cgroups().mounts}
        assert all(folder.is_dir() for folder in folders)
        assert value("cpuset", parent, "cpuset.mems") == value("cpuset", "/", "cpuset.mems")
        await cgroups.remove(pod.uid)
        assert not any(folder.exists() for folder in folders)
        assert cgroups.uids() == set()
        await cgroups.remove(pod.uid)

    async def test_pod_cgroups_remove_kills_remaining_processes(self, root: str) -> None:
        """Also by an agent that never saw the pod, below containers' own cgroups, and what ignores TERM."""
        cgroups, pod = pods_in(root), pod_of({})
        await cgroups.setup()
        parent = await cgroups.ensure(pod)
        for controller in detect_cgroups().mounts:
            (detect_cgroups().path(controller, parent) / "c1").mkdir(exist_ok=True)
        for name in ("cpuset.cpus", "cpuset.mems"):
            inner = detect_cgroups().path("cpuset", f"{parent}/c1") / name
            inner.write_text(value("cpuset", parent, name))
        with (
            process_in(parent) as one,
            process_in(f"{parent}/c1", "sh", "-c", "trap '' TERM; sleep 300") as two,
        ):
            reaping = asyncio.gather(asyncio.to_thread(one.wait), asyncio.to_thread(two.wait))
            again = pods_in(root)
            assert again.uids() == {pod.uid}
            await again.remove(pod.uid)
            # A shell whose child was killed first may still get to say so itself.
            assert {*await reaping} <= {-signal.SIGKILL, 128 + signal.SIGKILL}
        assert again.uids() == set()

    async def test_cgroup_files_remove_unkillable_process_raises_error_with_pids(
        self, root: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        async def powerless(*_: object, **__: object) -> bool:
            return False

        cgroups, pod = pods_in(root), pod_of({})
        await cgroups.setup()
        parent = await cgroups.ensure(pod)
        monkeypatch.setattr(cgroup_files, "kill_members", powerless)
        with process_in(parent) as process:
            with pytest.raises(CgroupWriteError, match=rf"does not go away; processes in it: {process.pid}"):
                await CgroupFiles(detect_cgroups()).remove(tuple(parent.strip("/").split("/")), 0.1)

    async def test_pod_cgroups_ensure_after_crash_sets_missing_limits(self, root: str) -> None:
        pod = pod_of({"limits": {"cpu": "1", "memory": "1Gi"}})
        cgroups = pods_in(root)
        await cgroups.setup()
        name = (root.strip("/"), "kubepods", f"pod{pod.uid}")
        CgroupFiles(detect_cgroups()).make(name, CgroupValues())
        parent = "/" + "/".join(name)
        assert value("memory", parent, "memory.limit_in_bytes") == NO_LIMIT
        assert await pods_in(root).ensure(pod) == parent
        assert value("memory", parent, "memory.limit_in_bytes") == str(1 << 30)
        assert value("cpu", parent, "cpu.cfs_quota_us") == "100000"

    async def test_pod_cgroups_ensure_existing_pod_is_unchanged(self, root: str) -> None:
        pod, cgroups = pod_of({"requests": {"cpu": "1"}}), pods_in(root)
        await cgroups.setup()
        parent = await cgroups.ensure(pod)
        shares = detect_cgroups().path("cpu", parent) / "cpu.shares"
        shares.write_text("77")
        await cgroups.ensure(pod)
        assert shares.read_text().strip() == "77"
        detect_cgroups().path("pids", parent).rmdir()
        await cgroups.ensure(pod)
        assert shares.read_text().strip() == "1024"

    async def test_pod_cgroups_burstable_shares_follow_pods(self, root: str) -> None:
        cgroups = pods_in(root)
        await cgroups.setup()
        first, second = (pod_of({"requests": {"cpu": cpu}}) for cpu in ("1", "2"))

        def weight() -> str:
            return value("cpu", f"{root}/kubepods/burstable", "cpu.shares")

        await cgroups.ensure(first)
        assert weight() == "1024", "the kernel's own value, until all pods are known"
        await cgroups.update_qos([first])
        assert weight() == "1024"
        await cgroups.ensure(second)
        assert weight() == "3072"
        await cgroups.remove(first.uid)
        assert weight() == "2048"
        await cgroups.update_qos([])
        assert weight() == "2"
        assert value("cpu", f"{root}/kubepods/besteffort", "cpu.shares") == "2"

    async def test_pod_cgroups_removed_tree_is_recreated_with_values(self, root: str) -> None:
        """Somebody removed it while it was empty: it is made again with all that it was set to."""
        cgroups = pods_in(root, kube_reserved={"cpu": "1"})
        pods = [
            pod_of({}),
            pod_of({"requests": {"cpu": "1"}}),
            pod_of({"limits": {"cpu": "1", "memory": "1Gi"}}),
        ]
        await cgroups.setup()
        await cgroups.update_qos(pods)
        for pod in pods:
            for tree in cgroup_tree.find_trees(root.strip("/")):
                assert await cgroup_tree.remove(tree)
            parent = await cgroups.ensure(pod)
            assert parent.endswith(f"/pod{pod.uid}")
            limits = value("memory", f"{root}/kubepods", "memory.limit_in_bytes")
            assert limits == str(int(CAPACITY["memory"]))
            weights = [value("cpu", f"{root}/kubepods{tier}", "cpu.shares") for tier in ("", *TIERS)]
            assert weights == ["1024", "1024", "2"]
        for tier in TIERS:
            await CgroupFiles(detect_cgroups()).remove(tuple(f"{root}/kubepods{tier}".strip("/").split("/")))
        await cgroups.ensure(pod_of({}))
        assert [value("cpu", f"{root}/kubepods{tier}", "cpu.shares") for tier in TIERS] == ["1024", "2"]

    @pytest.mark.looptime
    async def test_pod_cgroups_foreign_values_are_rewritten_periodically(self, root: str) -> None:
        cgroups = pods_in(root)
        await cgroups.setup()
        await cgroups.update_qos([])
        weights = [detect_cgroups().path("cpu", f"{root}/kubepods{tier}") / "cpu.shares" for tier in TIERS]
        for path in weights:
            path.write_text("500")
        await cgroups.update_qos([])
        assert [path.read_text() for path in weights] == ["500\n", "500\n"], "a call costs nothing"
        await asyncio.sleep(REWRITE_SECONDS)
        await cgroups.update_qos([])
        assert [path.read_text() for path in weights] == ["2\n", "2\n"]
        for tree in cgroup_tree.find_trees(root.strip("/")):
            assert await cgroup_tree.remove(tree)
        await asyncio.sleep(REWRITE_SECONDS)
        await cgroups.update_qos([])
        assert [path.read_text() for path in weights] == ["2\n", "2\n"]
        assert value("memory", f"{root}/kubepods", "memory.limit_in_bytes") == str(int(CAPACITY["memory"]))

    async def test_pod_cgroups_shrunk_pod_after_restart_keeps_rejected_limit(self, root: str) -> None:
        """What the kernel refuses while containers have more is left as it is; the pod can go on."""
        before, cgroups = pods_in(root), pods_in(root)
        large = pod_of({"limits": {"cpu": "1", "memory": "64Mi"}})
        small = pod_of({"limits": {"cpu": "500m", "memory": "64Mi"}})
        small.metadata.uid = large.uid
        await before.setup()
        parent = await before.ensure(large)
        name = tuple(parent.strip("/").split("/"))
        CgroupFiles(detect_cgroups()).make((*name, "container"), CgroupValues(quota=100_000))
        assert await cgroups.ensure(small) == parent
        assert value("cpu", parent, "cpu.cfs_quota_us") == "100000"
        # A new pod's limits must hold.
        impossible = pods_in(root, cpu_cfs_quota_period=1_000)
        with pytest.raises(CgroupWriteError, match="cannot set"):
            await impossible.ensure(pod_of({"limits": {"cpu": "1", "memory": "64Mi"}}))

    async def test_pod_cgroups_setup_enforces_node_allocatable_and_reserved(self, root: str) -> None:
        detect = detect_cgroups()
        CgroupFiles(detect).make((root.strip("/"), "sys"), CgroupValues())
        cgroups = pods_in(
            root,
            kube_reserved={"memory": "1Gi", "cpu": "1"},
            system_reserved={"memory": "512Mi", "cpu": "250m", "pid": "500"},
            system_reserved_cgroup=f"{root}/sys",
            enforce_node_allocatable=["pods", "system-reserved"],
        )
        await cgroups.setup()
        assert value("cpu", f"{root}/kubepods", "cpu.shares") == "768"
        limit = int(CAPACITY["memory"]) - (1536 << 20)
        assert value("memory", f"{root}/kubepods", "memory.limit_in_bytes") == str(limit)
        assert value("pids", f"{root}/kubepods", "pids.max") == str(32768 - 500)
        assert value("cpu", f"{root}/sys", "cpu.shares") == "256"
        assert value("memory", f"{root}/sys", "memory.limit_in_bytes") == str(512 << 20)
        assert value("pids", f"{root}/sys", "pids.max") == "500"

    async def test_pod_cgroups_setup_reserved_cgroup_missing_raises_error(self, root: str) -> None:
        cgroups = pods_in(
            root,
            kube_reserved={"cpu": "1"},
            kube_reserved_cgroup=f"{root}/none",
            enforce_node_allocatable=["pods", "kube-reserved-compressible"],
        )
        with pytest.raises(CgroupWriteError, match="kube-reserved-compressible but there is no cgroup"):
            await cgroups.setup()

    @pytest.mark.parametrize("kind", ["kube", "system"])
    async def test_pod_cgroups_setup_enforced_reservation_empty_raises_error(
        self, root: str, kind: str
    ) -> None:
        CgroupFiles(detect_cgroups()).make((root.strip("/"), "daemons"), CgroupValues())
        settings: dict[str, Any] = {f"{kind}_reserved_cgroup": f"{root}/daemons"}
        cgroups = pods_in(root, enforce_node_allocatable=["pods", f"{kind}-reserved"], **settings)
        with pytest.raises(CgroupWriteError, match=f"has {kind}-reserved but nothing is .* {kind}Reserved"):
            await cgroups.setup()

    async def test_pod_cgroups_setup_usage_above_limit_is_retried(
        self, root: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """The limit is tried again, and the start goes on."""
        monkeypatch.setattr(node_cgroups, "RETRY_SECONDS", 0.0)
        cgroups = pods_in(root)
        await cgroups.setup()
        hog = "import time; data = bytearray(64 << 20); print('full', flush=True); time.sleep(300)"
        small = pods_in(root, kube_reserved={"memory": str(int(CAPACITY["memory"]) - (8 << 20))})
        pod = pod_of({})
        parent = await cgroups.ensure(pod)
        with subprocess.Popen(
            ["sh", "-c", f'read go; exec python3 -c "{hog}"'], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        ) as process:
            (detect_cgroups().path("memory", parent) / "cgroup.procs").write_text(str(process.pid))
            assert process.stdin is not None
            assert process.stdout is not None
            process.stdin.write(b"\n")
            process.stdin.close()
            assert await asyncio.to_thread(process.stdout.readline) == b"full\n"
            await small.setup()
            before = value("memory", f"{root}/kubepods", "memory.limit_in_bytes")
            process.kill()
            process.wait()
        await small.update_qos([])
        assert before == str(int(CAPACITY["memory"]))
        assert value("memory", f"{root}/kubepods", "memory.limit_in_bytes") == str(8 << 20)

    async def test_cgroup_files_make_invalid_limit_raises_cgroup_error(self, root: str) -> None:
        name = (root.strip("/"),)
        with pytest.raises(CgroupWriteError, match=r"cannot set .*cpu.cfs_period_us to 1: Invalid argument"):
            CgroupFiles(detect_cgroups()).make(name, CgroupValues(quota=1, period=1))

    async def test_pod_cgroups_ensure_many_pods_costs_little_cpu_time(self, root: str) -> None:
        cgroups = pods_in(root)
        await cgroups.setup()
        await cgroups.update_qos([])
        pods = [
            pod_of({"limits": {"cpu": "1", "memory": "1Gi"}, "requests": {"cpu": "1m"}}) for _ in range(40)
        ]
        began = time.process_time()
        for pod in pods:
            await cgroups.ensure(pod)
        each = (time.process_time() - began) / len(pods)
        for pod in pods:
            await cgroups.remove(pod.uid)
        assert cgroups.uids() == set()
        assert each < 0.02, f"{each * 1000:.1f} ms of cpu per pod"


class TestRefusals:
    async def test_pod_cgroups_cgroups_per_qos_off_does_nothing(self) -> None:
        cgroups = PodCgroups(
            KubeletConfiguration(cgroups_per_qos=False), FeatureGates(), detect_cgroups(), CAPACITY
        )
        await cgroups.setup()
        assert await cgroups.ensure(pod_of({})) == ""
        await cgroups.remove("uid")
        await cgroups.update_qos([pod_of({})])
        assert cgroups.uids() == set()

    @pytest.mark.parametrize(
        ("config", "message"),
        [
            ({"cgroup_driver": "systemd"}, "set it to cgroupfs, here and in the runtime"),
            ({"kube_reserved": {"memory": "1Ti"}}, "1Ti of memory is reserved but the machine has only"),
        ],
    )
    async def test_pod_cgroups_setup_invalid_settings_raise_cgroup_error(
        self, config: dict[str, Any], message: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(systemd, "is_running", lambda: False)
        with pytest.raises(CgroupWriteError, match=message):
            await pods_in("/pyk-test-never-made", **config).setup()
        assert cgroup_tree.find_trees("pyk-test-never-made") == []

    async def test_pod_cgroups_setup_missing_controllers_raises_cgroup_error(self, tmp_path: Path) -> None:
        none = Cgroups(CgroupMode.V2, tmp_path, {"cpu": tmp_path, "pids": tmp_path}, {})
        with pytest.raises(CgroupWriteError, match="controllers cpuset, memory are missing"):
            await PodCgroups(KubeletConfiguration(), FeatureGates(), none, CAPACITY).setup()

    async def test_pod_cgroups_hostile_uid_raises_cgroup_error(self) -> None:
        pod = pod_of({})
        pod.metadata.uid = "../../.."
        with pytest.raises(CgroupWriteError, match="uid"):
            await pods_in("/pyk-test-never-made").ensure(pod)
        with pytest.raises(CgroupWriteError, match="uid"):
            await pods_in("/pyk-test-never-made").remove("")
