"""What a container's spec says, seen from inside a real container and from its cgroup."""

import json
import re
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.manifests import IMAGE, container, forever, pod
from tests.support.node import Node, is_ready, status_of

pytestmark = pytest.mark.machine


@pytest.fixture(autouse=True)
def tidy(node: Node) -> Iterator[None]:
    """Take the test's manifests away; the module's end proves that their pods are gone."""
    yield
    for path in node.manifests.iterdir():
        path.unlink()


def capabilities(text: str) -> set[str]:
    return set(re.findall(r"Cap\w+:\t([0-9a-f]+)", text))


def test_container_env_references_are_expanded(node: Node) -> None:
    env = [
        {"name": "WHO", "value": "world"},
        {"name": "GREETING", "value": "hello $(WHO), $$(WHO) and $(NOBODY)"},
        {"name": "NODE", "valueFrom": {"fieldRef": {"fieldPath": "spec.nodeName"}}},
        {"name": "IP", "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}},
        {"name": "TIER", "valueFrom": {"fieldRef": {"fieldPath": "metadata.labels['tier']"}}},
        {
            "name": "MEMORY",
            "valueFrom": {"resourceFieldRef": {"resource": "limits.memory", "divisor": "1Mi"}},
        },
    ]
    main = container(env=env, resources={"limits": {"memory": "32Mi"}}, args=["$(WHO)"])
    started = node.start_pod(pod("env", main, meta={"labels": {"tier": "front"}}))
    found = dict(line.split("=", 1) for line in node.shell("env-n1", "env").splitlines())
    assert found["GREETING"] == "hello world, $(WHO) and $(NOBODY)"
    assert (found["NODE"], found["TIER"], found["MEMORY"]) == ("n1", "front", "32")
    assert found["IP"] == started["status"]["podIP"]
    # For a moment it is the runtime's own program that is about to become it.
    node.wait(
        "the command's argument", lambda: node.shell("env-n1", "cat /proc/1/cmdline").endswith("\0world\0")
    )


def test_container_env_file_key_ref_reads_file_of_init_container(node: Node) -> None:
    mount = {"name": "shared", "mountPath": "/shared"}
    script = "mkdir /shared/app; printf \"OTHER='x'\\nKEY='two\\nlines'\\n\" > /shared/app/env"
    first = container("first", ["sh", "-c", script], volumeMounts=[mount])
    ref = {"volumeName": "shared", "path": "app/env", "key": "KEY"}
    main = container(env=[{"name": "GIVEN", "valueFrom": {"fileKeyRef": ref}}])
    volumes = [{"name": "shared", "emptyDir": {}}]
    node.start_pod(pod("env-file", main, initContainers=[first], volumes=volumes))
    assert node.shell("env-file-n1", 'echo "$GIVEN"', "main") == "two\nlines\n"


def test_container_security_context_sets_user_groups_and_capabilities(node: Node) -> None:
    security = {
        "runAsUser": 1000,
        "runAsGroup": 2000,
        "readOnlyRootFilesystem": True,
        "allowPrivilegeEscalation": False,
        "capabilities": {"drop": ["ALL"], "add": ["NET_BIND_SERVICE"]},
    }
    root = container("root", securityContext={"runAsUser": 0, "capabilities": {"drop": ["ALL"]}})
    node.start_pod(
        pod(
            "secure",
            container(securityContext=security),
            root,
            securityContext={"supplementalGroups": [3000], "fsGroup": 4000},
        )
    )
    assert node.shell("secure-n1", "id", "main").split() == [
        "uid=1000", "gid=2000", "groups=2000,3000,4000"
    ]  # fmt: skip
    status = node.shell("secure-n1", "cat /proc/self/status", "main")
    assert "NoNewPrivs:\t1" in status
    assert re.search(r"CapBnd:\t0*400\n", status), status
    assert "read-only" in node.shell("secure-n1", "touch /x 2>&1 || true", "main").lower()
    assert capabilities(node.shell("secure-n1", "cat /proc/self/status", "root")) == {"0" * 16}


def test_container_run_as_non_root_with_root_image_is_rejected(node: Node) -> None:
    node.write(pod("noroot", container(securityContext={"runAsNonRoot": True})))
    told = node.wait_event("noroot-n1", "Failed")
    assert "container has runAsNonRoot and image will run as root" in told
    # The event comes first, the status with the end of the step.
    node.wait_pod(
        "noroot-n1",
        "to say why it waits",
        lambda it: status_of(it, "main")["state"]["waiting"]["reason"] == "CreateContainerConfigError",
    )
    assert not node.truth.containers("noroot-n1")
    # The rest of the node goes on, and a user who is not root is let in.
    node.start_pod(pod("user", container(securityContext={"runAsNonRoot": True, "runAsUser": 5})))
    assert node.shell("user-n1", "id -u") == "5\n"


def test_pod_sysctls_hostname_and_dns_are_applied(node: Node) -> None:
    node.start_pod(
        pod(
            "names",
            container(),
            hostname="busy",
            subdomain="sub",
            hostAliases=[{"ip": "10.1.2.3", "hostnames": ["far.example", "far"]}],
            dnsPolicy="None",
            dnsConfig={
                "nameservers": ["192.0.2.53"],
                "searches": ["one.example", "two.example"],
                "options": [{"name": "ndots", "value": "2"}, {"name": "edns0"}],
            },
            securityContext={"sysctls": [{"name": "kernel.shm_rmid_forced", "value": "1"}]},
        )
    )
    shell = "hostname; cat /proc/sys/kernel/shm_rmid_forced; cat /etc/resolv.conf"
    assert node.shell("names-n1", shell).splitlines() == [
        "busy", "1", "search one.example two.example", "nameserver 192.0.2.53", "options ndots:2 edns0"
    ]  # fmt: skip
    hosts = node.shell("names-n1", "cat /etc/hosts")
    address = node.wait_ready("names-n1")["status"]["podIP"]
    assert f"{address}\tbusy.sub.default.svc.cluster.local\tbusy\n" in hosts
    assert "10.1.2.3\tfar.example\tfar\n" in hosts


def test_pod_host_network_and_shared_pid_namespace_are_applied(node: Node) -> None:
    node.write(pod("host", container(), hostNetwork=True))
    node.write(
        pod(
            "shared",
            container("one", forever("(sleep 7777 &)")),
            container("two"),
            shareProcessNamespace=True,
        )
    )
    host = node.wait_ready("host-n1")
    assert host["status"]["podIP"] == host["status"]["hostIP"]
    assert node.shell("host-n1", "hostname") == socket.gethostname() + "\n"
    assert node.shell("host-n1", "readlink /proc/self/ns/net").strip() == str(
        Path("/proc/self/ns/net").readlink()
    )
    node.wait_ready("shared-n1")
    # It runs, but its shell may not have come so far.
    node.wait("the other's process", lambda: "sleep 7777" in node.shell("shared-n1", "ps", "two"))


def test_pod_empty_dir_and_host_path_volumes_are_mounted(node: Node, tmp_path: Path) -> None:
    (tmp_path / "note").write_text("from the host")
    mounts = [
        {"name": "disk", "mountPath": "/disk"},
        {"name": "memory", "mountPath": "/memory"},
        {"name": "host", "mountPath": "/host", "readOnly": True},
        {"name": "disk", "mountPath": "/part", "subPath": "inner"},
    ]
    volumes = [
        {"name": "disk", "emptyDir": {}},
        {"name": "memory", "emptyDir": {"medium": "Memory", "sizeLimit": "4Mi"}},
        {"name": "host", "hostPath": {"path": str(tmp_path), "type": "Directory"}},
    ]
    started = node.start_pod(
        pod(
            "volumes",
            container("one", volumeMounts=mounts),
            container("two", volumeMounts=mounts),
            volumes=volumes,
        )
    )
    uid = started["metadata"]["uid"]
    node.shell("volumes-n1", "echo here > /disk/file; echo there > /part/file", "one")
    assert (
        node.shell("volumes-n1", "cat /disk/file /disk/inner/file /host/note", "two")
        == "here\nthere\nfrom the host"
    )
    assert "read-only" in node.shell("volumes-n1", "touch /host/x 2>&1 || true", "one").lower()
    assert re.search(r"tmpfs /memory tmpfs .*size=4096k", node.shell("volumes-n1", "cat /proc/mounts", "one"))
    folder = node.root / "pods" / uid / "volumes" / "kubernetes.io~empty-dir" / "disk"
    assert (folder / "file").read_text() == "here\n"
    assert folder.stat().st_mode & 0o777 == 0o777
    node.remove("volumes")
    node.wait_gone("volumes-n1", uid)
    assert (tmp_path / "note").read_text() == "from the host"


def test_host_path_volume_missing_directory_is_retried(node: Node, tmp_path: Path) -> None:
    missing = tmp_path / "later"
    node.write(
        pod(
            "waits",
            container(volumeMounts=[{"name": "host", "mountPath": "/host"}]),
            volumes=[{"name": "host", "hostPath": {"path": str(missing), "type": "Directory"}}],
        )
    )
    assert "hostPath type check failed" in node.wait_event("waits-n1", "FailedMount")
    missing.mkdir()
    node.wait_ready("waits-n1")


def test_container_resources_are_set_in_cgroups(node: Node) -> None:
    limits = {"requests": {"cpu": "100m", "memory": "16Mi"}, "limits": {"cpu": "500m", "memory": "32Mi"}}
    same = {"limits": {"cpu": "250m", "memory": "48Mi"}}
    found = {
        "burstable": node.start_pod(pod("burstable", container(resources=limits))),
        "guaranteed": node.start_pod(pod("guaranteed", container(resources=same))),
        "besteffort": node.start_pod(pod("besteffort", container())),
    }
    assert {name: it["status"]["qosClass"].lower() for name, it in found.items()} == {n: n for n in found}

    def value(name: str, controller: str, file: str, *, of_container: bool = True) -> str:
        base = Path(f"/sys/fs/cgroup/{controller}{node.instance.cgroup_root}/kubepods")
        base = base if name == "guaranteed" else base / name
        base /= f"pod{found[name]['metadata']['uid']}"
        if of_container:
            base /= node.truth.running(f"{name}-n1")[0].id
        return (base / file).read_text().strip()

    if not Path("/sys/fs/cgroup/memory").is_dir():
        pytest.skip("the values of cgroup v1 are looked at here")
    assert value("burstable", "cpu", "cpu.shares") == "102"
    assert value("burstable", "cpu", "cpu.cfs_quota_us") == "50000"
    assert value("burstable", "memory", "memory.limit_in_bytes") == str(32 << 20)
    assert value("burstable", "memory", "memory.limit_in_bytes", of_container=False) == str(32 << 20)
    assert value("burstable", "cpu", "cpu.shares", of_container=False) == "102"
    assert value("guaranteed", "cpu", "cpu.cfs_quota_us", of_container=False) == "25000"
    assert value("guaranteed", "memory", "memory.limit_in_bytes") == str(48 << 20)
    assert value("besteffort", "cpu", "cpu.shares") == "2"
    scores = {name: int(node.shell(f"{name}-n1", "cat /proc/1/oom_score_adj")) for name in found}
    assert scores["besteffort"] == 1000
    assert 0 < scores["burstable"] < 1000
    # Without CAP_SYS_RESOURCE a runtime that may not go lower is told to stay where it is.
    assert scores["guaranteed"] in (-997, int(Path("/proc/self/oom_score_adj").read_text()))


def test_container_over_memory_limit_reports_oom_killed(node: Node) -> None:
    # The runtime's own program, which becomes the container's, must fit in, too.
    greedy = container(command=["sh", "-c", "tail /dev/zero"], resources={"limits": {"memory": "16Mi"}})
    node.write(pod("greedy", greedy, restartPolicy="Never"))
    ended = status_of(node.wait_phase("greedy-n1", "Failed"), "main")["state"]["terminated"]
    assert ended["exitCode"] == 137
    # The runtime may hear of the reason after the end.
    node.wait_pod(
        "greedy-n1",
        "to say why it ended",
        lambda it: status_of(it, "main")["state"]["terminated"]["reason"] == "OOMKilled",
    )


def test_container_logs_have_upstream_paths_and_symlinks(node: Node) -> None:
    main = container(command=forever("echo out; echo err >&2; printf no-line-end"))
    started = node.start_pod(pod("talks", main))
    uid = started["metadata"]["uid"]
    path = node.instance.pod_logs / f"default_talks-n1_{uid}" / "main" / "0.log"

    def parsed() -> set[tuple[str, ...]]:
        return {tuple(line.split(" ", 3)[1:]) for line in path.read_text().splitlines()}

    node.wait("the log", lambda: {("stdout", "F", "out"), ("stderr", "F", "err")} <= parsed())
    (found,) = node.truth.running("talks-n1")
    link = node.instance.pod_logs.parent / "containers" / f"talks-n1_default_main-{found.id}.log"
    node.wait("the link to the log", lambda: link.resolve() == path.resolve())
    node.remove("talks")
    node.wait_gone("talks-n1", uid)
    node.wait("the link to be gone", lambda: not link.is_symlink())


def test_image_absent_with_policy_never_waits_err_image_never_pull(node: Node) -> None:
    absent = {"name": "main", "image": "registry.local/absent:1", "imagePullPolicy": "Never"}
    node.write(pod("imageless", absent, container("other")))
    found = node.wait_pod(
        "imageless-n1",
        "to have tried",
        lambda it: any("waiting" in s["state"] and s["state"]["waiting"]["reason"] == "ErrImageNeverPull"
                       for s in it["status"].get("containerStatuses", ())),
    )  # fmt: skip
    assert found["status"]["phase"] == "Pending"
    other = node.wait_pod(
        "imageless-n1", "to run its other container", lambda it: status_of(it, "other")["ready"]
    )
    assert not is_ready(other)


def test_image_name_invalid_is_rejected(node: Node) -> None:
    node.write(pod("misnamed", {"name": "main", "image": "Not A Name", "imagePullPolicy": "IfNotPresent"}))

    def refused() -> bool:
        found = node.pod("misnamed-n1")
        if found is None:  # a manifest that names no possible image may be refused as a whole
            return "misnamed" in node.log_text() and "image" in node.log_tail()
        return any(
            status["state"].get("waiting", {}).get("reason") == "InvalidImageName"
            for status in found["status"].get("containerStatuses", ())
        )

    node.wait("the image's name to be refused", refused)


def test_pod_restart_request_keeps_sandbox_and_pod_ip(node: Node) -> None:
    before = node.start_pod(pod("again", container(), container("other")))
    ids = {status["name"]: status["containerID"] for status in before["status"]["containerStatuses"]}
    answer = node.control("POST", f"/pods/{before['metadata']['uid']}/restart?container=main")
    assert answer["containers"] == ["main"]
    after = node.wait_pod(
        "again-n1", "to be restarted", lambda it: is_ready(it) and status_of(it, "main")["restartCount"] == 1
    )
    assert after["status"]["podIP"] == before["status"]["podIP"]
    assert after["metadata"]["uid"] == before["metadata"]["uid"]
    assert status_of(after, "main")["containerID"] != ids["main"]
    assert status_of(after, "other")["containerID"] == ids["other"]
    assert len(node.truth.sandboxes("again-n1")) == 1
    assert (
        "no container"
        in node.control("POST", f"/pods/{before['metadata']['uid']}/restart?container=x")["message"]
    )


def test_manifest_pod_list_starts_all_pods(node: Node) -> None:
    items = [pod("first"), pod("second")]
    node.write(json.dumps({"apiVersion": "v1", "kind": "PodList", "items": items}), "list.json")
    node.wait_ready("first-n1")
    node.wait_ready("second-n1")


def test_container_status_shows_seed_image_and_id(node: Node) -> None:
    started = node.start_pod(pod("seed"))
    (status,) = started["status"]["containerStatuses"]
    assert status["image"] == IMAGE
    assert status["imageID"].startswith("sha256:")
