"""Which of the kernel's namespaces a pod shares with the host, and its containers with each other.

A sandbox and its containers must be told the same, so both ask here.
"""

from __future__ import annotations

from collections.abc import Iterable

from pykubelet.api.pod import Pod
from pykubelet.cri import runtime_pb2 as cri
from pykubelet.runtime.facts import IdMappings, IdRange
from pykubelet.runtime.problems import ConfigProblem


def pod_namespaces(pod: Pod, mappings: IdMappings | None) -> cri.NamespaceOption:
    """Give a pod's namespaces; raises ConfigProblem for a user namespace that cannot be had."""
    spec = pod.spec
    own_pid = cri.POD if spec.share_process_namespace else cri.CONTAINER
    return cri.NamespaceOption(
        network=cri.NODE if spec.host_network else cri.POD,
        ipc=cri.NODE if spec.host_ipc else cri.POD,
        pid=cri.NODE if spec.host_pid else own_pid,
        userns_options=_user_namespace(spec.host_users is False, mappings),
    )


def id_messages(ranges: Iterable[IdRange]) -> list[cri.IDMapping]:
    """Give ranges of ids as the runtime wants them."""
    return [
        cri.IDMapping(host_id=ids.host_id, container_id=ids.container_id, length=ids.length) for ids in ranges
    ]


def _user_namespace(wanted: bool, mappings: IdMappings | None) -> cri.UserNamespace:
    if not wanted:
        return cri.UserNamespace(mode=cri.NODE)
    if mappings is None:
        raise ConfigProblem("can't set `spec.hostUsers: false`, runtime does not support user namespaces")
    return cri.UserNamespace(mode=cri.POD, uids=id_messages(mappings.uids), gids=id_messages(mappings.gids))
