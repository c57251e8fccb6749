"""Swap, which only pods of the API server may have.

There is no API server in the guest. The pod comes from a checkpoint, as on a node that was rebooted
while its API server is away.
"""

import json
from pathlib import Path

import yaml

from tests.support.data_dir import short_dir
from tests.support.manifests import container, pod
from tests.support.node import NAME, running
from tests.vm.guest.node import SLOW, guest_node, meminfo, value

UID = "11111111-2222-3333-4444-555555555555"


def unreachable_server(path: Path) -> Path:
    """A kubeconfig of an API server that is not there."""
    config = {
        "clusters": [{"name": "c", "cluster": {"server": "https://127.0.0.1:1"}}],
        "users": [{"name": "u", "user": {"token": "t"}}],
        "contexts": [{"name": "x", "context": {"cluster": "c", "user": "u"}}],
        "current-context": "x",
    }
    path.write_text(yaml.safe_dump(config))
    return path


def test_container_swap_limit_is_proportional_to_memory_request(swap: None) -> None:
    resources = {"requests": {"cpu": "50m", "memory": "64Mi"}, "limits": {"memory": "128Mi"}}
    # With what an API server fills in.
    one = container(resources=resources, imagePullPolicy="IfNotPresent")
    document = pod("burst", one, hostNetwork=True, nodeName=NAME, dnsPolicy="Default", restartPolicy="Always")
    document["metadata"] |= {"uid": UID, "namespace": "default"}
    with short_dir() as path:
        folder = path.parent / "checkpoints"
        folder.mkdir(mode=0o700)
        (folder / f"{UID}.json").write_text(json.dumps({"pod": document}))
        flags = (
            f"--kubeconfig={unreachable_server(path.parent / 'kubeconfig')}",
            f"--pod-checkpoint-dir={folder}",
            "--anonymous-auth",
            "--authorization-mode=AlwaysAllow",
        )
        with guest_node(path, "cgroupfs", *flags) as node, running(node):
            node.wait_ready("burst", SLOW)
            share = (64 << 20) / meminfo("MemTotal") * meminfo("SwapTotal")
            found = int(value(node.container_place("burst"), "memory.swap.max"))
            assert 0 < share - 4096 < found <= share
