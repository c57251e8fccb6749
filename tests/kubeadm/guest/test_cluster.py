"""A cluster of two nodes made by an unmodified kubeadm, with our kubelet on both.

The tests are steps of one story, in this order: init, addons, join, upgrade, reset. Preflight runs with all
its checks; none is ignored.
"""

import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from cryptography import x509
from cryptography.x509.oid import NameOID

from pykubelet import KUBERNETES_VERSION
from pykubelet.standalone.seed_images import BUSYBOX_IMAGE
from tests.kubeadm.guest.node import (
    SLOW,
    attempt,
    mounts_below,
    must,
    prepare_node,
    running_tasks,
    save_logs,
    say,
    wait_for,
    write_network,
)
from tests.kubeadm.remote import RemoteHost
from tests.kubeadm.settings import (
    CONTROL,
    WORKER,
    init_configuration,
    join_configuration,
    shared,
)

pytestmark = pytest.mark.timeout(7200)

INIT_SECONDS = 3600.0
JOIN_SECONDS = 2400.0
CONFIG = Path("/etc/kubeadm.yaml")
ADMIN = "/etc/kubernetes/admin.conf"
STATIC = ("etcd", "kube-apiserver", "kube-controller-manager", "kube-scheduler")
WEB = f"""\
apiVersion: v1
kind: Service
metadata:
  name: web
spec:
  selector:
    app: web
  ports:
  - port: 80
    targetPort: 8080
---
apiVersion: v1
kind: Pod
metadata:
  name: web
  labels:
    app: web
spec:
  terminationGracePeriodSeconds: 1
  tolerations:
  - operator: Exists
  containers:
  - name: web
    image: {BUSYBOX_IMAGE}
    command: [sh, -c, "mkdir /www && hostname >/www/index.html && exec httpd -f -p 8080 -h /www"]
"""
CLIENT = """\
apiVersion: v1
kind: Pod
metadata:
  name: {name}
spec:
  restartPolicy: Never
  terminationGracePeriodSeconds: 1
  nodeSelector:
    kubernetes.io/hostname: {node}
  tolerations:
  - operator: Exists
  containers:
  - name: client
    image: {image}
    command: [sh, -c, "{command}"]
"""


def kubectl(*arguments: str, timeout: float = SLOW) -> str:
    return must("kubectl", f"--kubeconfig={ADMIN}", *arguments, timeout=timeout)


def objects(*arguments: str) -> list[dict[str, Any]]:
    """Return the objects that kubectl lists; none while the API server does not respond."""
    done = attempt("kubectl", f"--kubeconfig={ADMIN}", "get", *arguments, "-o", "json")
    return list(json.loads(done.output)["items"]) if done.code == 0 else []


def condition_holds(document: dict[str, Any], name: str) -> bool:
    conditions = document.get("status", {}).get("conditions", [])
    return any(one["type"] == name and one["status"] == "True" for one in conditions)


def ready_pods(*arguments: str) -> dict[str, str]:
    """Return the node of each pod that is Running and Ready, by the pod's name."""
    return {
        pod["metadata"]["name"]: pod["spec"]["nodeName"]
        for pod in objects("pods", *arguments)
        if pod["status"].get("phase") == "Running" and condition_holds(pod, "Ready")
    }


def ready_nodes() -> set[str]:
    return {node["metadata"]["name"] for node in objects("nodes") if condition_holds(node, "Ready")}


def apply(text: str) -> None:
    path = Path("/etc/kubeadm-test.yaml")
    path.write_text(text)
    kubectl("apply", "-f", str(path))


def run_client(name: str, node: str, command: str) -> str:
    """Run a shell command in a pod on a node, and return its output."""
    apply(CLIENT.format(name=name, node=node, image=BUSYBOX_IMAGE, command=command))
    phase: Callable[[], str] = lambda: kubectl("get", "pod", name, "-o", "jsonpath={.status.phase}")  # noqa: E731
    wait_for(f"end of pod {name}", lambda: phase() in ("Succeeded", "Failed"))
    output = kubectl("logs", name)
    assert phase() == "Succeeded", output
    return output


def report_cluster() -> None:
    say("kubectl get nodes,pods -A -o wide\n" + kubectl("get", "nodes,pods", "-A", "-o", "wide"))


@pytest.fixture(scope="session", autouse=True)
def prepared() -> Iterator[None]:
    """This guest as a node that kubeadm can use; logs are saved at the end."""
    say("preparing")
    prepare_node()
    say("prepared")
    try:
        yield
    finally:
        save_logs()


@pytest.fixture(scope="session")
def worker(prepared: None) -> Iterator[RemoteHost]:
    """The other guest, when it is prepared."""
    host = RemoteHost(shared("worker"))
    assert host.run("hostname", timeout=JOIN_SECONDS).output.strip() == WORKER.name
    yield host
    host.stop()


def test_init_unmodified_preflight_starts_control_plane() -> None:
    """Verify that `kubeadm init` succeeds without ignored checks, and static pods run on our kubelet."""
    version = must("kubeadm", "version", "-o", "short").strip()
    CONFIG.write_text(init_configuration(version))
    say("kubeadm init")
    output = must("kubeadm", "init", "--config", str(CONFIG), timeout=INIT_SECONDS)
    say(output)
    assert "Your Kubernetes control-plane has initialized successfully!" in output
    (node,) = objects("nodes")
    assert node["status"]["nodeInfo"]["kubeletVersion"] == KUBERNETES_VERSION
    assert Path("/var/lib/kubelet/pykubelet.sock").is_socket()
    expected = {f"{name}-{CONTROL.name}" for name in STATIC}
    wait_for("ready static pods", lambda: expected <= set(ready_pods("-n", "kube-system")))


def test_network_added_node_ready_and_addons_running() -> None:
    """Verify that the node is Ready with a network, and kube-proxy and CoreDNS are Running."""
    assert ready_nodes() == set()
    write_network(CONTROL)
    wait_for("Ready node", lambda: ready_nodes() == {CONTROL.name})
    (node,) = objects("nodes")
    assert node["spec"]["podCIDR"] == CONTROL.pod_subnet
    wait_for("kube-proxy", lambda: len(ready_pods("-n", "kube-system", "-l", "k8s-app=kube-proxy")) == 1)
    wait_for("CoreDNS", lambda: len(ready_pods("-n", "kube-system", "-l", "k8s-app=kube-dns")) == 2)
    report_cluster()


def test_service_by_name_reached_through_coredns_and_kube_proxy() -> None:
    """Verify that a pod resolves a Service by CoreDNS, and reaches it through kube-proxy's rules."""
    apply(WEB)
    wait_for("pod web", lambda: "web" in ready_pods())
    address = kubectl("get", "service", "web", "-o", "jsonpath={.spec.clusterIP}")
    assert f"-d {address}/32" in must("iptables-save", "-t", "nat")
    output = run_client(
        "here", CONTROL.name, "nslookup web.default.svc.cluster.local; wget -q -O - http://web"
    )
    assert address in output
    assert output.strip().endswith("web")


def test_join_bootstrap_token_second_node_ready(worker: RemoteHost) -> None:
    """Verify that `kubeadm join` with a new token bootstraps the other kubelet's certificate."""
    printed = must("kubeadm", "token", "create", "--print-join-command")
    match = re.search(r"--token (\S+) +--discovery-token-ca-cert-hash (\S+)", printed)
    assert match, printed
    assert match[1] in must("kubeadm", "token", "list")
    path = shared("join.yaml")
    path.write_text(join_configuration(*match.groups()))
    say("kubeadm join")
    result = worker.run("kubeadm", "join", "--config", str(path), timeout=JOIN_SECONDS)
    say(result.output)
    assert result.code == 0
    wait_for("second Ready node", lambda: ready_nodes() == {CONTROL.name, WORKER.name})
    (node,) = [one for one in objects("nodes") if one["metadata"]["name"] == WORKER.name]
    assert node["spec"]["podCIDR"] == WORKER.pod_subnet
    csrs = objects("certificatesigningrequests")
    assert any(one["spec"]["username"].startswith("system:bootstrap:") for one in csrs)
    pem = worker.run("cat", "/var/lib/kubelet/pki/kubelet-client-current.pem", timeout=SLOW).output
    (common_name,) = x509.load_pem_x509_certificate(pem.encode()).subject.get_attributes_for_oid(
        NameOID.COMMON_NAME
    )
    assert common_name.value == f"system:node:{WORKER.name}"


def test_joined_node_pod_reaches_service_of_the_other_node(worker: RemoteHost) -> None:
    """Verify that a pod on the second node runs, with kube-proxy there and CoreDNS here; logs work."""
    wait_for("kube-proxy", lambda: len(ready_pods("-n", "kube-system", "-l", "k8s-app=kube-proxy")) == 2)
    output = run_client("there", WORKER.name, "wget -q -O - http://web.default.svc.cluster.local")
    assert output.strip() == "web"
    report_cluster()


def test_upgrade_node_kubelet_config_accepted(worker: RemoteHost) -> None:
    """Verify that `kubeadm upgrade node` writes the kubelet's configuration, with which it starts again."""
    worker.run("rm", "/var/lib/kubelet/config.yaml", timeout=SLOW)
    done = worker.run("kubeadm", "upgrade", "node", "phase", "kubelet-config", timeout=SLOW)
    assert done.code == 0, done.output
    assert worker.run("systemctl", "restart", "kubelet", timeout=SLOW).code == 0
    healthy = ("wget", "-q", "-O", "-", "http://127.0.0.1:10248/healthz")
    wait_for("healthy kubelet", lambda: worker.run("busybox", *healthy, timeout=SLOW).output.strip() == "ok")


def test_reset_worker_leaves_nothing(worker: RemoteHost) -> None:
    """Verify that `kubeadm reset` of the second node removes its pods, mounts and files."""
    kubectl("drain", WORKER.name, "--ignore-daemonsets", "--force", "--delete-emptydir-data")
    done = worker.run("kubeadm", "reset", "--force", timeout=JOIN_SECONDS)
    say(done.output)
    assert done.code == 0
    assert worker.run("ctr", "-n", "k8s.io", "tasks", "list", "-q", timeout=SLOW).output.split() == []
    assert worker.run("find", "/var/lib/kubelet", "-mindepth", "1", timeout=SLOW).output.split() == []
    assert worker.run("find", "/etc/kubernetes", "-type", "f", timeout=SLOW).output.split() == []
    kubectl("delete", "node", WORKER.name)
    assert ready_nodes() == {CONTROL.name}


def test_reset_control_plane_leaves_nothing() -> None:
    """Verify that `kubeadm reset` of the control plane ends its static pods and removes everything."""
    say(must("kubeadm", "reset", "--force", timeout=INIT_SECONDS))
    assert running_tasks() == 0
    assert mounts_below("/var/lib/kubelet") == []
    assert list(Path("/var/lib/kubelet").rglob("*")) == []
    assert list(Path("/etc/kubernetes/manifests").glob("*")) == []
