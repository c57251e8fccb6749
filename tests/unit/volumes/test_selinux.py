"""SELinux labels of volumes, with a fake SELinux: which volumes are mounted with which label."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import CollectorRegistry

from pykubelet.volumes.csi.dependencies import CsiDependencies
from pykubelet.volumes.csi.mounter import CsiMounter
from pykubelet.volumes.csi.paths import CsiPaths, VolumeData, write_data
from pykubelet.volumes.csi.volume import CsiVolume
from pykubelet.volumes.errors import VolumePluginError
from pykubelet.volumes.manager import PodVolumes
from pykubelet.volumes.metrics import SELinuxMetrics, VolumeMetrics
from pykubelet.volumes.mounts.selinux import (
    SELinuxAdmission,
    context_option,
    mount_label,
    supports_context_mount,
)
from pykubelet.volumes.plugin import BaseVolumePlugin, MemoryLimits, MountedVolume, VolumeToMount
from tests.support.csi import inline, make_pod, persistent
from tests.support.csi_driver.process import DRIVER
from tests.support.volumes import Node, Shelf, pod_with

FILES = "system_u:object_r:container_file_t:"
RWOP = ["ReadWriteOncePod"]


def using(*levels: str | None) -> list[dict[str, Any]]:
    """Containers that use the volume, each with a level of its own, or none."""
    return [
        {
            "name": f"c{index}",
            "image": "i",
            "volumeMounts": [{"name": "data", "mountPath": "/data"}],
            "securityContext": {"seLinuxOptions": {"level": level}} if level else {},
        }
        for index, level in enumerate(levels)
    ]


class SELinux:
    """A host with SELinux and a policy."""

    def __init__(self, base: Path) -> None:
        self.fs, self.policies = base / "fs", base / "etc"
        self.fs.mkdir()
        (self.fs / "enforce").touch()
        (self.policies / "targeted/contexts").mkdir(parents=True)
        (self.policies / "config").write_text("SELINUX=enforcing\nSELINUXTYPE=targeted\n")
        (self.policies / "targeted/contexts/lxc_contexts").write_text(
            f'process = "system_u:system_r:container_t:s0"\nfile = "{FILES}s0"\n'
        )

    def label(self, context: dict[str, Any] | None = None, *, supported: bool = True, **spec: Any) -> str:
        volume = persistent(make_pod(securityContext=context or {}, **spec), modes=RWOP)
        return mount_label(volume, supported=supported, fs=self.fs, policies=self.policies)


@pytest.fixture
def host(tmp_path: Path) -> SELinux:
    return SELinux(tmp_path)


def test_mount_label_without_selinux_or_policy_is_empty(host: SELinux) -> None:
    assert host.label(containers=using("s0:c1")) == f"{FILES}s0:c1"
    (host.policies / "config").unlink()
    assert host.label(containers=using("s0:c1")) == ""
    (host.fs / "enforce").unlink()
    assert host.label(containers=using("s0:c1", "s0:c2")) == ""


COMMON = {"seLinuxOptions": {"level": "s0:c9", "user": "u"}}
OTHER = {"name": "other", "image": "i", "securityContext": {"seLinuxOptions": {"level": "s0:c7"}}}


@pytest.mark.parametrize(
    ("context", "spec", "label"),
    [
        ({}, {"containers": using(None)}, ""),
        ({}, {"containers": using("s0:c1", None)}, f"{FILES}s0:c1"),
        (COMMON, {"containers": using("s0:c1")}, f"{FILES}s0:c1"),
        (COMMON, {"containers": using(None)}, "u:object_r:container_file_t:s0:c9"),
        ({}, {"containers": [*using("s0:c1"), OTHER]}, f"{FILES}s0:c1"),
        ({}, {"containers": [OTHER]}, ""),
        ({}, {"initContainers": using("s0:c1"), "containers": [OTHER]}, f"{FILES}s0:c1"),
        ({"seLinuxChangePolicy": "Recursive"}, {"containers": using("s0:c1")}, ""),
        ({"seLinuxChangePolicy": "MountOption"}, {"containers": using("s0:c1")}, f"{FILES}s0:c1"),
    ],
)
def test_mount_label_follows_containers_that_use_volume(
    host: SELinux, context: dict[str, Any], spec: dict[str, Any], label: str
) -> None:
    assert host.label(context, **spec) == label
    assert host.label(context, supported=False, **spec) == ""


def test_mount_label_different_labels_in_pod_raises(host: SELinux) -> None:
    expected = f"^multiple SELinux labels found: {FILES}s0:c1,{FILES}s0:c2$"
    with pytest.raises(VolumePluginError, match=expected):
        host.label(containers=using("s0:c1", "s0:c2"))


@pytest.mark.parametrize(
    ("modes", "all_modes", "expected"),
    [
        (RWOP, False, True),
        (["ReadWriteOnce"], False, False),
        ([*RWOP, "ReadWriteOnce"], False, False),
        (["ReadWriteOnce"], True, True),
        (["ReadWriteMany"], True, True),
    ],
)
def test_supports_context_mount_by_access_mode_and_gate(
    host: SELinux, modes: Sequence[str], all_modes: bool, expected: bool
) -> None:
    pod = make_pod()
    found = supports_context_mount(persistent(pod, modes=modes), all_modes=all_modes, fs=host.fs)
    assert found is expected
    assert not supports_context_mount(inline(pod), all_modes=True, fs=host.fs)
    assert not supports_context_mount(persistent(pod, modes=modes, block=True), all_modes=True, fs=host.fs)
    (host.fs / "enforce").unlink()
    assert not supports_context_mount(persistent(pod, modes=modes), all_modes=True, fs=host.fs)


def test_capability_label_becomes_quoted_mount_option() -> None:
    volume = CsiVolume.parse(persistent(make_pod(), mount_options=("noatime",)))
    label = f"{FILES}s0:c1,c2"
    assert volume.capability(label=label).mount_options == ("noatime", f'context="{label}"')
    assert context_option(label) == f'context="{label}"'


def test_check_labels_volume_of_other_pod_with_other_label_raises(tmp_path: Path) -> None:
    deps: Any = object.__new__(CsiDependencies)
    object.__setattr__(deps, "paths", CsiPaths(tmp_path))
    mounter = CsiMounter(deps)
    data = VolumeData(volume_handle="vol-1", driver_name=DRIVER, se_linux_mount_context=f"{FILES}s0:c1")
    write_data(CsiPaths(tmp_path).data("u-1", "pv-vol-1"), data)
    mounter._check_labels(CsiVolume.parse(persistent(make_pod("u-1"))), "")
    mounter._check_labels(CsiVolume.parse(persistent(make_pod("u-2"))), f"{FILES}s0:c1")
    mounter._check_labels(CsiVolume.parse(persistent(make_pod("u-2"), "vol-2")), f"{FILES}s0:c2")
    expected = f'^conflicting SELinux labels of volume pv-vol-1: "{FILES}s0:c1" and "{FILES}s0:c2"$'
    with pytest.raises(VolumePluginError, match=expected):
        mounter._check_labels(CsiVolume.parse(persistent(make_pod("u-2"))), f"{FILES}s0:c2")


def test_mount_label_empty_options_beside_label_raises(host: SELinux) -> None:
    chosen_by_runtime = {**using(None)[0], "name": "own", "securityContext": {"seLinuxOptions": {}}}
    with pytest.raises(VolumePluginError, match="multiple SELinux labels"):
        host.label(containers=[*using("s0:c1"), chosen_by_runtime])
    assert host.label(containers=[chosen_by_runtime]) == ""


class _Plugin(BaseVolumePlugin):
    """A plugin that does or does not mount with labels."""

    def __init__(self, supported: bool = True) -> None:
        self._supported = supported

    async def set_up(self, volume: VolumeToMount) -> MountedVolume:
        return MountedVolume("/")

    async def supports_context_mount(self, volume: VolumeToMount) -> bool:
        return self._supported


class Admission:
    """Admission on a host with SELinux, with its metrics."""

    def __init__(self, host: SELinux, *, all_modes: bool = False) -> None:
        self.registry = CollectorRegistry()
        metrics = SELinuxMetrics(self.registry)
        self.checks = SELinuxAdmission(metrics, all_modes=all_modes, fs=host.fs, policies=host.policies)

    async def admit(
        self, uid: str, *levels: str, modes: Sequence[str] = RWOP, supported: bool = True
    ) -> None:
        volume = persistent(make_pod(uid, containers=using(*levels)), modes=modes)
        await self.checks.admit(volume, _Plugin(supported), "csi/d")

    def count(self, name: str, mode: str, **labels: str) -> float | None:
        return self.registry.get_sample_value(
            f"volume_manager_selinux_{name}_total", {"access_mode": mode, **labels}
        )


async def test_admit_volume_with_label_counts_once_until_forgotten(host: SELinux) -> None:
    admission = Admission(host)
    for _ in range(2):
        await admission.admit("u-1", "s0:c1")
    await admission.admit("u-2", "s0:c1")
    assert admission.count("volumes_admitted", "RWOP", volume_plugin="csi/d") == 1
    admission.checks.forget("u-1")
    with pytest.raises(VolumePluginError, match="conflicting SELinux labels of volume pv-vol-1"):
        await admission.admit("u-3", "s0:c2")
    assert admission.count("volume_context_mismatch_errors", "RWOP", volume_plugin="csi/d") == 1
    admission.checks.forget("u-2")
    await admission.admit("u-3", "s0:c2")
    assert admission.count("volumes_admitted", "RWOP", volume_plugin="csi/d") == 2


@pytest.mark.parametrize(
    ("modes", "mode"),
    [
        (["ReadWriteOnce"], "RWO"),
        (["ReadWriteOnce", "ReadOnlyMany"], "ROX"),
        (["ReadOnlyMany", "ReadWriteMany"], "RWX"),
    ],
)
async def test_admit_other_access_modes_counts_warnings_only(
    host: SELinux, modes: Sequence[str], mode: str
) -> None:
    admission = Admission(host)
    await admission.admit("u-1", "s0:c1", modes=modes)
    for _ in range(2):
        await admission.admit("u-2", "s0:c2", modes=modes)
        await admission.admit("u-3", "s0:c1", "s0:c2", modes=modes)
    assert admission.count("volume_context_mismatch_warnings", mode, volume_plugin="csi/d") == 2
    assert admission.count("pod_context_mismatch_warnings", mode) == 1
    assert admission.count("pod_context_mismatch_errors", mode) is None
    strict = Admission(host, all_modes=True)
    with pytest.raises(VolumePluginError, match="multiple SELinux labels"):
        await strict.admit("u-3", "s0:c1", "s0:c2", modes=modes)
    assert strict.count("pod_context_mismatch_errors", mode) == 1


async def test_admit_plugin_without_labels_raises_only_for_labels_in_pod(host: SELinux) -> None:
    admission = Admission(host)
    await admission.admit("u-1", "s0:c1", supported=False)
    await admission.admit("u-2", "s0:c2", supported=False)
    assert admission.count("volumes_admitted", "RWOP", volume_plugin="csi/d") is None
    with pytest.raises(VolumePluginError, match="multiple SELinux labels"):
        await admission.admit("u-3", "s0:c1", "s0:c2", supported=False)


async def test_pod_volumes_inline_volume_with_two_labels_counts_warning(
    host: SELinux, root: Path, shelf: Shelf
) -> None:
    registry = CollectorRegistry()
    volumes = PodVolumes(
        root,
        objects=shelf,
        node=Node(),
        memory=MemoryLimits(lambda pod: None, 1 << 30),
        metrics=VolumeMetrics(registry),
    )
    volumes._se_linux = SELinuxAdmission(
        volumes.metrics.se_linux, all_modes=True, fs=host.fs, policies=host.policies
    )
    pod = pod_with({"name": "data", "emptyDir": {}}, containers=using("s0:c1", "s0:c2"))
    name = "volume_manager_selinux_pod_context_mismatch_warnings_total"
    for expected in (1, 2):
        for _ in range(2):
            await volumes.mount(pod)
            assert registry.get_sample_value(name, {"access_mode": "inline"}) == expected
        await volumes.unmount(pod.uid)
