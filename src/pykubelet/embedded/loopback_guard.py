"""Packet filter rule that keeps pods away from services on the node's loopback (CVE-2020-8558).

The CNI plugin `portmap` sets `route_localnet` on the bridge, so that host ports work on 127.0.0.1. With it
the kernel accepts packets for 127.0.0.0/8 from the bridge, which a pod with NET_RAW can send: to services
that rely on being reachable from the node only, such as the read-only port. The upstream kubelet's KUBE-
FIREWALL drops such packets in the INPUT chain unless their source is 127.0.0.0/8, which a pod can forge as
well. This rule drops all of them, before address translation: on the bridge itself no packet of a host port
has such a destination, since replies are addressed to the bridge until they are translated back.

The rule carries the label of the CNI network, by which `pykubelet down` finds and removes it
(`host.iptables.remove_network`). It stays while the kubelet is stopped, because pods run on. `keep_guard`
adds it again after another process flushed the packet filter.
"""

from __future__ import annotations

import asyncio

from pykubelet.embedded.errors import EmbeddedError
from pykubelet.embedded.instance import Instance
from pykubelet.host.processes import CommandError, run
from pykubelet.logs import get_logger

log = get_logger(__name__)

CHECK_SECONDS = 10.0
"""Seconds between checks that the rule is still there."""


def guard_rule(instance: Instance) -> list[str]:
    """Return the rule's specification: chain mangle/PREROUTING, in the arguments of iptables."""
    label = f'name: "{instance.name}" id: "loopback"'
    match = ["-i", instance.bridge, "-d", "127.0.0.0/8", "-m", "comment", "--comment", label]
    return ["PREROUTING", *match, "-j", "DROP"]


async def ensure_guard(instance: Instance) -> bool:
    """Ensure that the rule exists; return whether it was missing. Raises CommandError."""
    rule = guard_rule(instance)
    command = ("iptables", "--wait", "5", "-t", "mangle")
    try:
        await run(*command, "-C", *rule)
    except CommandError:
        await run(*command, "-I", *rule)
        return True
    return False


async def require_guard(instance: Instance) -> None:
    """Ensure that the rule exists before any pod starts. Raises EmbeddedError."""
    try:
        await ensure_guard(instance)
    except CommandError as err:
        raise EmbeddedError(
            f"cannot protect the node's loopback from pods on {instance.bridge}: {err}; "
            "check that 'iptables -t mangle -S' works as root"
        ) from err


async def keep_guard(instance: Instance, every: float = CHECK_SECONDS) -> None:
    """Add the rule again whenever it is missing, checking every `every` seconds, until cancelled."""
    while True:
        await asyncio.sleep(every)
        try:
            if await ensure_guard(instance):
                log.warning("Restored loopback rule after iptables flush", bridge=instance.bridge)
        except CommandError as err:
            log.error(err, "Failed to restore loopback rule, will retry", bridge=instance.bridge)
