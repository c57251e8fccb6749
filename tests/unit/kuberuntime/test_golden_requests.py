"""Our requests against recordings of the reference's: the same pods give the same requests."""

import json
from typing import Any

import pytest
import yaml

from pykubelet.api.meta import from_document
from pykubelet.api.pod import Container, Pod
from pykubelet.api.quantity import Quantity
from pykubelet.cm.qos import qos_class
from pykubelet.images.image_manager import PresentImage
from pykubelet.kuberuntime.configuration.cri_configs import make_container_config, make_sandbox_config
from pykubelet.kuberuntime.configuration.env import container_env
from pykubelet.kuberuntime.configuration.mounts import sub_path
from pykubelet.kuberuntime.configuration.options import (
    MountedVolume,
    RunContainerOptions,
    RunSandboxOptions,
    RuntimeNodeOptions,
)
from pykubelet.kuberuntime.errors import MissingSource
from pykubelet.objects.services import ClusterService, ServicePort, service_env
from pykubelet.podconfig.defaults import apply_defaults
from tests.support.golden import GOLDEN, as_recorded, unordered_env

POD_DIR = "ROOT/pods/POD_UID"

NODE = RuntimeNodeOptions(
    cluster_dns=("10.96.0.10",),
    cluster_domain="cluster.local",
    host_ips=("192.0.2.2",),
    memory_capacity=24682416 * 1024,
    swap_controller=True,
    huge_page_sizes=("2MB", "1GB"),
    allocatable={"cpu": Quantity.parse("2"), "memory": Quantity.parse("24580016Ki")},
)
SERVICES = (
    ClusterService("default", "kubernetes", "10.96.0.1", (ServicePort(443, "https"),)),
    ClusterService("scn-given-env", "web", "10.96.77.7", (ServicePort(80, "http"),)),
)
CLUSTER_PARENTS = {
    "Guaranteed": "/kubepods/podPOD_UID",
    "Burstable": "/kubepods/burstable/podPOD_UID",
    "BestEffort": "/kubepods/besteffort/podPOD_UID",
}


def recordings() -> list[Any]:
    found = []
    for path in sorted(GOLDEN.glob("given-*.json")):
        for name, recorded in json.loads(path.read_text()).items():
            found.append(pytest.param(path.stem, name, recorded["cri"], id=f"{path.stem}-{name}"))
    return found


def given(stem: str) -> list[dict[str, Any]]:
    return list(yaml.safe_load_all((GOLDEN / f"{stem}.yaml").read_text()))


def given_pod(stem: str, name: str) -> tuple[Pod, dict[str, Any]]:
    """A pod as the API server of the recorded node gave it out, and as it was written."""
    document = next(d for d in given(stem) if (d["kind"], d["metadata"]["name"]) == ("Pod", name))
    pod = from_document(Pod, document)
    pod.metadata.namespace = f"scn-{stem}"
    pod.metadata.uid = "POD_UID"
    pod.metadata.annotations = {
        **pod.metadata.annotations,
        "kubernetes.io/config.seen": "TIME",
        "kubernetes.io/config.source": "api",
    }
    pod.spec.node_name = "vm"
    apply_defaults(pod)
    return pod, document


def container_facts(
    stem: str, pod: Pod, document: dict[str, Any], container: Container
) -> RunContainerOptions:
    objects = {(d["kind"], d["metadata"]["name"]): d for d in given(stem)}

    def config_map(name: str) -> dict[str, str]:
        if ("ConfigMap", name) not in objects:
            raise MissingSource(f'configmap "{name}" not found')
        data: dict[str, str] = objects["ConfigMap", name]["data"]
        return data

    def secret(name: str) -> dict[str, bytes]:
        return {key: value.encode() for key, value in objects["Secret", name]["stringData"].items()}

    volumes = {}
    for volume in document["spec"].get("volumes", []):
        (kind,) = volume.keys() - {"name"}
        if kind == "hostPath":
            volumes[volume["name"]] = MountedVolume(volume["hostPath"]["path"])
        else:
            folder = {
                "emptyDir": "empty-dir",
                "configMap": "configmap",
                "downwardAPI": "downward-api",
            }.get(kind, kind)
            path = f"{POD_DIR}/volumes/kubernetes.io~{folder}/{volume['name']}"
            volumes[volume["name"]] = MountedVolume(path, read_only=kind != "emptyDir")
    facts: dict[str, Any] = {
        "node": NODE,
        "image": PresentImage("sha256:ID", 0, ""),
        "pod_ips": ("POD_IP",),
        "hosts_file": f"{POD_DIR}/etc-hosts",
        "termination_log": f"{POD_DIR}/containers/{container.name}/RAND",
        "volumes": volumes,
        "config_map": config_map,
        "secret": secret,
        "service_env": service_env(SERVICES, pod.metadata.namespace, bool(pod.spec.enable_service_links)),
    }
    env = container_env(pod, container, RunContainerOptions(**facts))
    sub_paths = {
        index: f"{POD_DIR}/volume-subpaths/{mount.name}/{container.name}/{index}"
        for index, mount in enumerate(container.volume_mounts)
        if sub_path(mount, env)
    }
    return RunContainerOptions(**facts, sub_paths=sub_paths)


@pytest.mark.parametrize(("stem", "name", "recorded"), recordings())
def test_cri_requests_recorded_pods_equal_upstream(
    stem: str, name: str, recorded: list[dict[str, Any]]
) -> None:
    pod, document = given_pod(stem, name)
    by_name = {c.name: c for c in (*pod.spec.containers, *pod.spec.init_containers)}
    compared = []
    for request in recorded:
        if request["method"] == "RunPodSandbox":
            facts = RunSandboxOptions(
                node=NODE, cgroup_parent=CLUSTER_PARENTS[qos_class(pod)], resolv_conf="nameserver 192.0.2.1\n"
            )
            ours = as_recorded(make_sandbox_config(pod, facts))
        else:
            container = by_name[request["config"]["metadata"]["name"]]
            container_request = make_container_config(
                pod, container, container_facts(stem, pod, document, container)
            )
            ours = as_recorded(container_request)
        assert unordered_env(ours) == unordered_env(request["config"])
        compared.append(request["method"])
    assert compared[0] == "RunPodSandbox"


def test_container_env_recorded_pod_order_preserved() -> None:
    pod, document = given_pod("given-env", "env")
    (container,) = pod.spec.containers
    env = container_env(pod, container, container_facts("given-env", pod, document, container))
    written = ["WHO", "GREETING", "NODE", "POD_IP", "TIER", "CPU_LIMIT", "MEM_REQ", "COLOR", "TOKEN"]
    assert list(env)[:13] == ["bad-name", "color", "size", "K_token", *written]
    assert all(name.startswith(("KUBERNETES_", "WEB_")) for name in list(env)[13:])
