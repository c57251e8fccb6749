"""The whole requests; their parts have tests of their own, and recordings in `test_golden_requests.py`."""

from typing import Any

import pytest

from pykubelet.api.pod import ContainerPort, EnvVar, Lifecycle, PodSecurityContext, SecurityContext, Sysctl
from pykubelet.cm.devices.run_options import DeviceRunOptions
from pykubelet.config.feature_gates import FeatureGates
from pykubelet.cri import runtime_pb2 as cri
from pykubelet.images.image_manager import PresentImage
from pykubelet.kuberuntime.configuration.cri_configs import make_container_config, make_sandbox_config
from pykubelet.kuberuntime.configuration.options import (
    RunContainerOptions,
    RunSandboxOptions,
    RuntimeNodeOptions,
)
from pykubelet.kuberuntime.errors import ContainerConfigError, InvalidHostname, RootNotAllowed
from tests.support.containers import make_container, make_pod

NODE = RuntimeNodeOptions(cluster_dns=("10.96.0.10",), cluster_domain="cluster.local")


def sandbox(*containers: Any, **fields: Any) -> cri.PodSandboxConfig:
    facts = RunSandboxOptions(node=NODE, attempt=2, cgroup_parent="/kubepods/podu-1", resolv_conf="")
    return make_sandbox_config(make_pod(*containers, **fields), facts)


def container(container_fields: dict[str, Any], **facts: Any) -> cri.ContainerConfig:
    subject = make_container(**container_fields)
    return make_container_config(make_pod(subject), subject, RunContainerOptions(**{"node": NODE} | facts))


def test_make_sandbox_config_sets_metadata_and_log_directory() -> None:
    message = sandbox()
    assert message.metadata == cri.PodSandboxMetadata(name="web", namespace="shop", uid="u-1", attempt=2)
    assert message.log_directory == "/var/log/pods/shop_web_u-1"
    assert message.linux.cgroup_parent == "/kubepods/podu-1"
    assert message.hostname == "web"


def test_make_sandbox_config_host_network_has_no_hostname() -> None:
    assert sandbox(host_network=True, hostname="Not_Good").hostname == ""
    with pytest.raises(InvalidHostname):
        sandbox(hostname="Not_Good")


def test_make_sandbox_config_duplicate_ports_sent_once() -> None:
    ports = [
        ContainerPort(container_port=80),
        ContainerPort(container_port=80),
        ContainerPort(container_port=80, host_port=8080, host_ip="127.0.0.1"),
        ContainerPort(container_port=80, host_port=8080, host_ip="::1"),
        ContainerPort(name="dns", container_port=53, protocol="UDP"),
        ContainerPort(name="dns", container_port=54, protocol="UDP"),
        ContainerPort(container_port=9, protocol="SCTP"),
        ContainerPort(container_port=9, protocol="odd"),
    ]
    message = sandbox(
        make_container(ports=ports),
        make_container("other", ports=ports[:1]),
        init_containers=[make_container("init", ports=ports)],
    )
    assert [(p.protocol, p.container_port, p.host_port, p.host_ip) for p in message.port_mappings] == [
        (cri.TCP, 80, 0, ""),
        (cri.TCP, 80, 8080, "127.0.0.1"),
        (cri.TCP, 80, 8080, "::1"),
        (cri.UDP, 53, 0, ""),
        (cri.SCTP, 9, 0, ""),
        (cri.TCP, 9, 0, ""),
        (cri.TCP, 80, 0, ""),
    ]


def test_make_sandbox_config_sysctl_names_use_dots() -> None:
    sysctls = [
        Sysctl(name="net/ipv4/conf/eth0.1/rp_filter", value="1"),
        Sysctl(name="kernel.shm_rmid_forced", value="0"),
    ]
    message = sandbox(security_context=PodSecurityContext(sysctls=sysctls))
    assert dict(message.linux.sysctls) == {
        "net.ipv4.conf.eth0/1.rp_filter": "1",
        "kernel.shm_rmid_forced": "0",
    }


def test_make_container_config_command_expands_environment() -> None:
    message = container(
        {
            "command": ["$(SHELL)", "-c", "$$(SHELL) $(GPU) $(ABSENT)"],
            "args": ["$(SHELL)"],
            "env": [EnvVar(name="SHELL", value="sh")],
            "working_dir": "/tmp",
            "stdin": True,
            "stdin_once": True,
            "tty": True,
        },
        device_options=DeviceRunOptions(
            env={"GPU": "0"}, cdi_devices=("vendor.com/gpu=0",), annotations={"a": "b"}
        ),
        attempt=3,
        image=PresentImage("sha256:1", 0, ""),
    )
    assert list(message.command) == ["sh", "-c", "$(SHELL) 0 $(ABSENT)"]
    assert list(message.args) == ["sh"]
    assert [(variable.key, variable.value) for variable in message.envs] == [("GPU", b"0"), ("SHELL", b"sh")]
    assert [device.name for device in message.CDI_devices] == ["vendor.com/gpu=0"]
    assert message.annotations["a"] == "b"
    assert message.annotations["io.kubernetes.container.restartCount"] == "3"
    assert (message.working_dir, message.stdin, message.stdin_once, message.tty) == ("/tmp", True, True, True)
    assert message.metadata == cri.ContainerMetadata(name="main", attempt=3)
    assert message.log_path == "main/3.log"
    assert message.image.image == "sha256:1"
    assert message.image.user_specified_image == "registry.local/busybox:1.35"


@pytest.mark.parametrize(
    ("name", "gate", "signal"),
    [
        (None, True, cri.RUNTIME_DEFAULT),
        ("SIGUSR1", False, cri.RUNTIME_DEFAULT),
        ("SIGUSR1", True, cri.SIGUSR1),
        ("SIGRTMIN+15", True, cri.SIGRTMINPLUS15),
        ("SIGRTMAX-1", True, cri.SIGRTMAXMINUS1),
        ("SIGNONSENSE", True, cri.RUNTIME_DEFAULT),
    ],
)
def test_make_container_config_stop_signal_mapped_if_gate_enabled(
    name: str | None, gate: bool, signal: int
) -> None:
    node = RuntimeNodeOptions(gates=FeatureGates().with_overrides({"ContainerStopSignals": gate}))
    assert container({"lifecycle": Lifecycle(stop_signal=name)}, node=node).stop_signal == signal


def test_make_container_config_expanded_arguments_above_limit_raise() -> None:
    with pytest.raises(ContainerConfigError, match="more than"):
        container({"args": ["$(V)"] * 100_000}, service_env={"V": "x" * 1_000_000})


def test_make_container_config_run_as_non_root_root_image_rejected() -> None:
    with pytest.raises(RootNotAllowed, match="image will run as root"):
        container({"security_context": SecurityContext(run_as_non_root=True)})


def test_make_container_config_binary_env_value_sent_as_bytes() -> None:
    message = container({}, service_env={"RAW": "\udcff\x01"})
    assert message.envs[0].value == b"\xff\x01"


@pytest.mark.parametrize("field", ["working_dir", "image"])
def test_make_container_config_invalid_unicode_field_raises(field: str) -> None:
    with pytest.raises(ContainerConfigError, match="cannot be sent"):
        container({field: "\ud800"})


def test_make_config_non_utf8_argument_env_or_annotation_raises() -> None:
    with pytest.raises(ContainerConfigError, match="cannot be sent"):
        container({"args": ["$(RAW)"]}, service_env={"RAW": "\udcff"})
    with pytest.raises(ContainerConfigError, match="cannot be sent"):
        container({"env": [EnvVar(name="A", value="\ud800")]})
    with pytest.raises(ContainerConfigError, match="cannot be sent"):
        sandbox(annotations={"a": "\ud800"})


def test_make_config_deterministic_and_leaves_pod_unchanged() -> None:
    subject = make_container(env=[EnvVar(name="A", value="$(B)")], ports=[ContainerPort(container_port=1)])
    pod = make_pod(subject, labels={"a": "b"})
    before = repr(pod)
    facts = RunContainerOptions(node=NODE, service_env={"B": "b"})
    first = make_container_config(pod, subject, facts).SerializeToString(deterministic=True)
    assert make_container_config(pod, subject, facts).SerializeToString(deterministic=True) == first
    make_sandbox_config(pod, RunSandboxOptions(node=NODE))
    assert repr(pod) == before
