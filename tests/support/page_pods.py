"""Pods for the page: running ones of several kinds, and one for each common reason not to run."""

from __future__ import annotations

from typing import Any

from pykubelet.standalone.seed_images import BUSYBOX_IMAGE

Document = dict[str, Any]
_BUSY = "while true; do i=0; while [ $i -lt {work} ]; do i=$((i+1)); done; sleep {pause}; done"
_LOG = 'n=0; while true; do n=$((n+1)); echo "GET /items/$n 200 {ms} ms"; sleep {pause}; done'
_GROW = (
    "i=0; x=; while [ $i -lt 400 ]; do x=$x$(head -c 12000 /dev/zero | tr '\\0' a); i=$((i+1)); sleep 0.1; "
    "done; sleep 3600"
)


def pod(name: str, script: str = "sleep 3600", *, namespace: str = "default", **fields: Any) -> Document:
    """Return the manifest of a pod with one container; fields of the spec are added."""
    container = container_of("main", script) | fields.pop("container", {})
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": name, "namespace": namespace} | fields.pop("metadata", {}),
        "spec": {"containers": [container], "terminationGracePeriodSeconds": 1} | fields,
    }


def container_of(name: str, script: str, **fields: Any) -> Document:
    """Return a container that runs a shell script."""
    return {
        "name": name,
        "image": BUSYBOX_IMAGE,
        "imagePullPolicy": "IfNotPresent",
        "command": ["sh", "-c", script],
        **fields,
    }


def resources(cpu: str, memory: str) -> Document:
    """Return requests and limits."""
    return {
        "resources": {"requests": {"cpu": cpu, "memory": memory}, "limits": {"cpu": cpu, "memory": memory}}
    }


def exec_probe(command: str, **fields: Any) -> Document:
    """Return a probe that runs a command every second."""
    return {"exec": {"command": ["sh", "-c", command]}, "periodSeconds": 1, **fields}


def failing_pods() -> list[Document]:
    """Return a pod for each common reason not to run."""
    return [
        pod("payment-api", "echo connecting to db:5432; echo 'fatal: no route to host' >&2; sleep 1; exit 1"),
        pod("image-typo", container={"image": "127.0.0.1:1/shop/fronted:v2", "imagePullPolicy": "Always"}),
        pod(
            "report-job",
            "tail /dev/zero",
            namespace="batch",
            restartPolicy="Never",
            container=resources("200m", "24Mi"),
        ),
        pod("settings", container={"envFrom": [{"configMapRef": {"name": "settings"}}]}, namespace="shop"),
        pod(
            "checkout",
            _LOG.format(ms=12, pause=1),
            namespace="shop",
            container={"readinessProbe": exec_probe("echo connection refused; exit 1")},
        ),
        pod("migrate", initContainers=[container_of("schema", "echo schema v7 missing; sleep 1; exit 3")]),
        pod(
            "disk-missing",
            volumes=[{"name": "data", "hostPath": {"path": "/nonexistent/pyk", "type": "Directory"}}],
            container={"volumeMounts": [{"name": "data", "mountPath": "/data"}]},
        ),
        pod("wrong-command", container={"command": ["/app/server"]}),
    ]


def running_pods() -> list[Document]:
    """Return pods that run, start, or have finished."""
    found = [
        pod(
            f"web-{number}",
            _LOG.format(ms=number, pause=1),
            namespace="shop",
            container=resources("100m", "32Mi")
            | {"readinessProbe": exec_probe("true"), "livenessProbe": exec_probe("true", periodSeconds=10)},
            metadata={"labels": {"app": "web", "tier": "front"}},
        )
        for number in range(1, 7)
    ]
    found += [
        pod(
            f"worker-{number}",
            _BUSY.format(work=2000 * number, pause=1),
            namespace="batch",
            container=resources("50m", "24Mi"),
        )
        for number in range(1, 5)
    ]
    found += [
        pod(f"agent-{number}", _LOG.format(ms=1, pause=5), namespace="kube-system", hostNetwork=True)
        for number in range(1, 4)
    ]
    found.append(
        pod(
            "cache",
            _GROW,
            namespace="shop",
            container=resources("100m", "48Mi"),
        )
    )
    found.append(pod("cleanup", "echo removed 12 files", namespace="batch", restartPolicy="Never"))
    found.append(pod("backup", "echo done", namespace="batch", restartPolicy="OnFailure"))
    found.append(
        pod(
            "importer",
            initContainers=[container_of("wait-for-db", "echo waiting; sleep 3600")],
            namespace="batch",
        )
    )
    found.append(
        pod(
            "warm-up",
            "sleep 3600",
            namespace="shop",
            container={"startupProbe": exec_probe("test -e /ready", failureThreshold=2000, periodSeconds=60)},
        )
    )
    store = pod(
        "store",
        _LOG.format(ms=3, pause=2),
        namespace="shop",
        volumes=[{"name": "data", "emptyDir": {}}],
        container=resources("100m", "32Mi")
        | {
            "volumeMounts": [{"name": "data", "mountPath": "/data"}],
            "command": [
                "sh",
                "-c",
                "head -c 20000000 /dev/urandom > /data/blob; " + _LOG.format(ms=3, pause=2),
            ],
        },
    )
    store["spec"]["containers"].append(
        container_of("metrics", _LOG.format(ms=1, pause=3), **resources("20m", "16Mi"))
    )
    found.append(store)
    found.append(
        pod(
            "proxy",
            _BUSY.format(work=9000, pause=0.2),
            namespace="shop",
            container=resources("30m", "16Mi"),
            initContainers=[container_of("mesh", "sleep 3600", restartPolicy="Always")],
        )
    )
    found.append(pod("flaky", "sleep 20; exit 2", namespace="batch"))
    return found


def mixed_pods() -> list[Document]:
    """Return about thirty pods of all kinds."""
    return [*failing_pods(), *running_pods()]
