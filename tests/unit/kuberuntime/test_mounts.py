from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pykubelet.api.pod import VolumeDevice, VolumeMount
from pykubelet.cm.devices.run_options import DeviceNode, DeviceRunOptions, HostMount
from pykubelet.cri import runtime_pb2 as cri
from pykubelet.kuberuntime.configuration.mounts import container_devices, container_mounts, sub_path
from pykubelet.kuberuntime.configuration.options import (
    IdMappings,
    IdRange,
    MountedVolume,
    RunContainerOptions,
    RuntimeNodeOptions,
)
from pykubelet.kuberuntime.errors import ContainerConfigError
from tests.support.containers import make_container, make_facts, make_pod

VOLUMES = {
    "data": MountedVolume("/pods/data", relabel=True),
    "config": MountedVolume("/pods/config", read_only=True),
}


def mounts(*wishes: VolumeMount, pod: dict[str, Any] | None = None, **facts: Any) -> list[cri.Mount]:
    container = make_container(
        volume_mounts=list(wishes), termination_message_path="dev/end" if "termination_log" in facts else ""
    )
    facts = {"volumes": VOLUMES, "pod_ips": ("10.0.0.1",)} | facts
    return container_mounts(make_pod(container, **(pod or {})), container, {"NAME": "x"}, make_facts(**facts))


def wish(name: str = "data", path: str = "/data", **fields: Any) -> VolumeMount:
    return VolumeMount(name=name, mount_path=path, **fields)


def test_container_mounts_volumes_in_spec_order() -> None:
    assert mounts(
        wish("config", "etc/app"),
        wish(read_only=True, mount_propagation="None"),
        wish(path="/shared", mount_propagation="Bidirectional"),
        wish(path="/in", mount_propagation="HostToContainer"),
    ) == [
        cri.Mount(container_path="/etc/app", host_path="/pods/config", readonly=True),
        cri.Mount(container_path="/data", host_path="/pods/data", readonly=True),
        cri.Mount(
            container_path="/shared", host_path="/pods/data", propagation=cri.PROPAGATION_BIDIRECTIONAL
        ),
        cri.Mount(
            container_path="/in", host_path="/pods/data", propagation=cri.PROPAGATION_HOST_TO_CONTAINER
        ),
    ]


def test_container_mounts_device_mounts_and_kubelet_files_added() -> None:
    made = mounts(
        wish(),
        device_options=DeviceRunOptions(mounts=(HostMount("/dev/x", "/x", read_only=True),)),
        hosts_file="/pods/etc-hosts",
        termination_log="/pods/end",
        node=RuntimeNodeOptions(selinux=True),
    )
    assert made == [
        cri.Mount(container_path="/x", host_path="/dev/x", readonly=True),
        cri.Mount(container_path="/data", host_path="/pods/data", selinux_relabel=True),
        cri.Mount(container_path="/etc/hosts", host_path="/pods/etc-hosts", selinux_relabel=True),
        cri.Mount(container_path="/dev/end", host_path="/pods/end", selinux_relabel=True),
    ]


@pytest.mark.parametrize(
    ("path", "pod", "ips", "there"),
    [
        ("/data", {}, ("10.0.0.1",), True),
        ("/data", {}, (), False),
        ("/data", {"host_network": True}, (), True),
        ("/etc/hosts", {}, ("10.0.0.1",), False),
    ],
)
def test_container_mounts_hosts_file_omitted_if_covered_or_no_ip(
    path: str, pod: dict[str, Any], ips: tuple[str, ...], there: bool
) -> None:
    made = mounts(wish(path=path), pod=pod, pod_ips=ips, hosts_file="/pods/etc-hosts")
    assert any(mount.host_path == "/pods/etc-hosts" for mount in made) == there


def test_container_mounts_sub_path_not_prepared_raises() -> None:
    wishes = wish(), wish(sub_path="a/b"), wish(sub_path_expr="$(NAME)/deep")
    made = mounts(*wishes, sub_paths={1: "/safe/1", 2: "/safe/2"})
    assert [mount.host_path for mount in made] == ["/pods/data", "/safe/1", "/safe/2"]
    with pytest.raises(
        ContainerConfigError, match='failed to prepare subPath for volumeMount "data" of container "main"'
    ):
        mounts(*wishes, sub_paths={1: "/safe/1"})


def test_container_mounts_image_volume_mounted_read_only() -> None:
    image = cri.ImageSpec(image="sha256:1", user_specified_image="example.com/data:1")
    (mount,) = mounts(wish("artifact", "/a", sub_path="x"), image_volumes={"artifact": image})
    assert mount == cri.Mount(container_path="/a", image=image, image_sub_path="x", readonly=True)


def test_container_mounts_missing_volume_raises() -> None:
    with pytest.raises(
        ContainerConfigError, match='cannot find volume "absent" to mount into container "main"'
    ):
        mounts(wish("absent"))


def test_container_mounts_unknown_propagation_raises() -> None:
    with pytest.raises(ContainerConfigError, match='invalid MountPropagation mode: "Sideways"'):
        mounts(wish(mount_propagation="Sideways"))


@pytest.mark.parametrize(
    ("fields", "supported", "wanted"),
    [
        ({"recursive_read_only": None}, True, False),
        ({"recursive_read_only": "Disabled"}, True, False),
        ({"recursive_read_only": "IfPossible", "read_only": True}, True, True),
        ({"recursive_read_only": "IfPossible", "read_only": True}, False, False),
        ({"recursive_read_only": "Enabled", "read_only": True, "mount_propagation": "None"}, True, True),
    ],
)
def test_container_mounts_recursive_read_only_mode_applied(
    fields: dict[str, Any], supported: bool, wanted: bool
) -> None:
    (mount,) = mounts(wish(**fields), recursive_read_only=supported)
    assert mount.recursive_read_only == wanted


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"recursive_read_only": "Enabled"}, "it is not read-only"),
        ({"recursive_read_only": "Enabled", "read_only": True}, "it is not supported by the runtime"),
        (
            {"recursive_read_only": "IfPossible", "read_only": True, "mount_propagation": "HostToContainer"},
            'not compatible with propagation "HostToContainer"',
        ),
        ({"recursive_read_only": "Perhaps", "read_only": True}, '"Perhaps" is not known'),
    ],
)
def test_container_mounts_recursive_read_only_unsupported_raises(
    fields: dict[str, Any], message: str
) -> None:
    with pytest.raises(ContainerConfigError, match=message):
        mounts(wish(**fields))


def test_container_mounts_user_namespace_sets_id_mappings() -> None:
    ids = IdMappings((IdRange(0, 1000, 10),), (IdRange(0, 2000, 10),))
    made = mounts(wish(), pod={"host_users": False}, hosts_file="/pods/etc-hosts", id_mappings=ids)
    assert len(made) == 2
    for mount in made:
        assert list(mount.uidMappings) == [cri.IDMapping(container_id=0, host_id=1000, length=10)]
        assert list(mount.gidMappings) == [cri.IDMapping(container_id=0, host_id=2000, length=10)]
    (plain,) = mounts(wish(), id_mappings=ids)
    assert not plain.uidMappings


@pytest.mark.parametrize(
    ("fields", "path"),
    [
        ({}, ""),
        ({"sub_path": "a/b"}, "a/b"),
        ({"sub_path": "$(NAME)"}, "$(NAME)"),
        ({"sub_path_expr": "$(NAME)/$$(NAME)/..x"}, "n/$(NAME)/..x"),
    ],
)
def test_sub_path_expression_expanded(fields: dict[str, str], path: str) -> None:
    assert sub_path(wish(**fields), {"NAME": "n"}) == path


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"sub_path": "/abs"}, "must not be an absolute path"),
        ({"sub_path": "a/../../b"}, r"must not contain '\.\.'"),
        ({"sub_path": ".."}, r"must not contain '\.\.'"),
        ({"sub_path_expr": "$(UP)"}, r"must not contain '\.\.'"),
        ({"sub_path_expr": "$(ROOT)"}, "must not be an absolute path"),
        ({"sub_path_expr": "$(RAW)"}, "SubPath `/\ufffd` must not be an absolute path"),
        ({"sub_path_expr": "$(B)/$(A)/$(EMPTY)"}, "missing value for A, B, EMPTY"),
    ],
)
def test_sub_path_invalid_path_raises(fields: dict[str, str], message: str) -> None:
    with pytest.raises(ContainerConfigError, match=message):
        sub_path(wish(**fields), {"UP": "../x", "ROOT": "/", "EMPTY": "", "RAW": "/\udcff"})


@given(st.text(alphabet="a./$()N"), st.text(alphabet="a./", max_size=6))
def test_sub_path_any_expression_stays_in_volume(expression: str, value: str) -> None:
    try:
        path = sub_path(wish(sub_path_expr=expression), {"N": value})
    except ContainerConfigError:
        return
    assert not path.startswith("/")
    assert ".." not in path.split("/")


def test_container_devices_plugin_devices_and_block_volumes_returned() -> None:
    container = make_container(volume_devices=[VolumeDevice(name="disk", device_path="/dev/xvda")])
    facts = RunContainerOptions(
        node=RuntimeNodeOptions(),
        device_options=DeviceRunOptions(devices=(DeviceNode("/dev/gpu0", "/dev/gpu", "rw"),)),
        block_volumes={"disk": DeviceNode("/pods/volumeDevices/disk", "", "r")},
    )
    assert container_devices(container, facts) == [
        cri.Device(host_path="/dev/gpu0", container_path="/dev/gpu", permissions="rw"),
        cri.Device(host_path="/pods/volumeDevices/disk", container_path="/dev/xvda", permissions="r"),
    ]


@pytest.mark.parametrize(
    ("device", "message"),
    [
        (VolumeDevice(name="disk", device_path="dev/x"), "must be an absolute path"),
        (VolumeDevice(name="absent", device_path="/dev/x"), 'cannot find volume "absent" to pass into'),
    ],
)
def test_container_devices_invalid_device_raises(device: VolumeDevice, message: str) -> None:
    container = make_container(volume_devices=[device])
    with pytest.raises(ContainerConfigError, match=message):
        container_devices(container, RunContainerOptions(node=RuntimeNodeOptions()))
