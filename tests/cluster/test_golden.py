"""The reference's recordings, replayed in a cluster: the same requests, statuses, events and objects."""

import csv
import json
import os
import stat
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from pykubelet.devcluster.reference import reference_traces
from tests.cluster.node import ClusterNode, cluster_node, in_cluster
from tests.cluster.plane import Plane
from tests.conftest import RunningRuntime
from tests.engine.node import Document, all_statuses, is_ready, status_of
from tests.engine.recording import Recording, recorded
from tests.golden import (
    GOLDEN,
    IMAGE,
    calls_about,
    given,
    given_pods,
    plain,
    recording_of,
    requests_of,
    unordered_env,
)

pytestmark = pytest.mark.machine

NODE = "vm"
STEMS = ("basic", "env", "lifecycle", "volumes")
PODS = given_pods(*STEMS)
REFERENCE = os.environ.get("GOLDEN_AGENT") == "reference"


def test_look(plane: Plane, runtime: RunningRuntime) -> None:
    import time
    import pickle

    out = Path(os.environ.get("GOLDEN_OUT", "/tmp/golden-out"))
    out.mkdir(exist_ok=True)
    hostdir = runtime.instance.data_dir / "hostdir"
    hostdir.mkdir()
    subprocess.run(["mount", "--bind", hostdir, hostdir], check=True)
    subprocess.run(["mount", "--make-shared", hostdir], check=True)
    ctr = ["ctr", "--address", str(runtime.instance.socket), "--namespace", "k8s.io", "images", "tag"]
    subprocess.run([*ctr, runtime.busybox_image, IMAGE], check=True, capture_output=True)
    socket = runtime.instance.data_dir / "proxy.sock"
    try:
        with recorded(runtime.endpoint, socket) as recording, reference_traces():
            node = cluster_node(
                plane,
                runtime,
                name=NODE,
                program=plane.reference_kubelet if REFERENCE else None,
                settings={
                    "clusterDNS": ["10.96.0.10"],
                    "containerRuntimeEndpoint": f"unix://{socket}",
                },
            )
            with in_cluster(node):
                for stem in STEMS:
                    plane.create(
                        {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": f"scn-given-{stem}"}}
                    )
                for stem in STEMS:
                    plane.wait_for("serviceaccount", "default", f"scn-given-{stem}")
                    plane.wait_for("configmap", "kube-root-ca.crt", f"scn-given-{stem}")
                pods: dict[str, Any] = {}

                def make(stem: str) -> None:
                    for d in given(stem):
                        d = json.loads(json.dumps(d).replace("/srv/hostdir", str(hostdir)))
                        d["metadata"]["namespace"] = f"scn-given-{stem}"
                        if d["kind"] == "Pod":
                            d["spec"]["nodeName"] = NODE
                        made = plane.create(d)
                        if d["kind"] == "Pod":
                            pods[d["metadata"]["name"]] = made

                node.write(
                    {
                        "apiVersion": "v1",
                        "kind": "Pod",
                        "metadata": {
                            "name": "static-web",
                            "namespace": "kube-system",
                            "labels": {"app": "static"},
                        },
                        "spec": {
                            "containers": [
                                {
                                    "name": "web",
                                    "image": IMAGE,
                                    "command": ["sh", "-c", "sleep 3600"],
                                    "resources": {"requests": {"cpu": "10m"}},
                                }
                            ]
                        },
                    }
                )
                make("basic")
                for p in list(pods.values()):
                    node.wait_pod_ready(p, 60)
                mirror = plane.wait_for("pod", "static-web-vm", "kube-system", is_ready, 60)
                time.sleep(3)
                (out / "node.json").write_text(json.dumps(node.node_object(), indent=1))
                (out / "lease.json").write_text(json.dumps(plane.wait_for("lease", "vm", "kube-node-lease"), indent=1))
                (out / "mirror.json").write_text(json.dumps(plane.get("pod", "static-web-vm", "kube-system"), indent=1))
                (out / "root.txt").write_text(subprocess.run(["find", str(node.root), "-printf", "%M %p\n"], capture_output=True, text=True).stdout)
                begin = time.monotonic()
                for stem in STEMS[1:]:
                    make(stem)
                last = {}
                with (out / "story.txt").open("w") as story:
                    while time.monotonic() - begin < float(os.environ.get("GOLDEN_SECONDS", "75")):
                        for name, pod in pods.items():
                            now = node.api_pod(pod)
                            s = now["status"]
                            key = json.dumps([s.get("phase"), s.get("resources"), [(c["name"], c["state"], c["lastState"], c["restartCount"]) for c in all_statuses(now)] if now["status"].get("containerStatuses") else None])
                            if last.get(name) != key:
                                last[name] = key
                                story.write(f"{time.monotonic() - begin:6.2f} {name} {key}\n")
                                story.flush()
                        if 25 < time.monotonic() - begin and not (out / "pods.json").exists():
                            (out / "pods.json").write_text(json.dumps({n: {"pod": node.api_pod(p), "events": [e for e in plane.events(p["metadata"]["namespace"], n)], "cri": requests_of(recording, p["metadata"]["uid"])} for n, p in pods.items()}, indent=1))
                        time.sleep(0.2)
                (out / "final.json").write_text(json.dumps({n: {"pod": node.api_pod(p), "events": [e for e in plane.events(p["metadata"]["namespace"], n)], "cri": requests_of(recording, p["metadata"]["uid"])} for n, p in pods.items()}, indent=1))
                p = pods["besteffort"]
                plane.delete("pod", "besteffort", "scn-given-basic", grace=1)
                node.wait("gone", lambda: node.api_pod(p) is None, 60)
                node.wait("gone", lambda: not node.truth.sandboxes("besteffort"), 100)
                (out / "calls.txt").write_text("\n".join(calls_about(recording, p["metadata"]["uid"])))
                (out / "agent.log").write_text(node.log_text())
    finally:
        subprocess.run(["umount", hostdir], check=False)
        for stem in STEMS:
            plane.delete("namespace", f"scn-given-{stem}")
