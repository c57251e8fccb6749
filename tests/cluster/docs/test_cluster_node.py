"""The commands of docs/cluster-node.md: a node joins a control plane with a token, runs a pod, and leaves."""

import os
import shlex
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

from tests.support.cluster_node import ClusterNode
from tests.support.node import BIN
from tests.support.plane import Plane, unique
from tests.support.tutorials import Tutorial, steps

pytestmark = pytest.mark.machine
OF_THE_TEST = {"apiVersion", "kind", "containerRuntimeEndpoint", "cgroupDriver", "staticPodPath"}
"""Settings that must be those of the test's runtime and directories."""


def test_cluster_node_page_joins_runs_a_pod_and_leaves(
    plane: Plane, make_node: Callable[..., ClusterNode], namespace: str, tmp_path: Path
) -> None:
    name = unique("docs")
    replaced = {
        "https://10.0.0.1:6443": plane.server,
        "/etc/kubernetes/pki/ca.crt": str(plane.authority),
        "abcdef.0123456789abcdef": plane.cluster.settings.token,
        "edge-1": name,
    }
    kubectl = plane.cluster.programs.kubectl
    context = tmp_path / "admin.conf"
    context.write_text(plane.admin.read_text())
    env = {"PATH": f"{BIN}:{kubectl.parent}:{os.environ['PATH']}", "KUBECONFIG": str(context)}
    plane.kubectl("config", "set-context", "--current", f"--namespace={namespace}", kubeconfig=context)
    runner = Tutorial(tmp_path, replaced, env)
    node: ClusterNode | None = None
    for step in steps("cluster-node.md"):
        if step.rule == "node":
            program, *flags = shlex.split(runner.translate(step.text))
            given = dict(zip(flags[::2], flags[1::2], strict=True))
            assert (program, given.pop("--hostname-override")) == ("kubelet", name)
            settings = yaml.safe_load((tmp_path / given.pop("--config")).read_text())
            kubeconfig = tmp_path / given.pop("--kubeconfig")
            node = make_node(
                name=name,
                kubeconfig=kubeconfig,
                flags=[f"{flag}={tmp_path / value}" for flag, value in given.items()],
                settings={field: value for field, value in settings.items() if field not in OF_THE_TEST},
            )
            node.start()
        elif step.rule == "stop":
            assert node is not None
            assert node.stop() == 0, node.log_tail()
        else:
            runner.run(step)
    assert node is not None
    assert plane.find("node", name) is None
