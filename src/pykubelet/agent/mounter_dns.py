"""resolv.conf of the root directory that `--experimental-mounter-path` mounts in.

The mounter resolves names of services with it. It is written at the start and after a change of the cluster's
name servers; a failure is logged, and the file is written again with the next change or start. Without the
host's file it has no search domains, as upstream.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from pykubelet.agent.cluster import AgentSettings
from pykubelet.kuberuntime.configuration.dns import parse_resolv_conf
from pykubelet.kuberuntime.errors import ContainerConfigError
from pykubelet.logs import get_logger
from pykubelet.util.files import write_if_changed
from pykubelet.util.tasks import finish_in_thread

log = get_logger(__name__)


class MounterDns:
    """Writer of the mounter's resolv.conf; writes are in the order of the calls."""

    def __init__(self, settings: AgentSettings) -> None:
        mounter = settings.flags.experimental_mounter_path
        self._path = Path(mounter.removesuffix("/mounter"), "rootfs", "etc", "resolv.conf")
        self._host = settings.config.resolv_conf
        self._lock = asyncio.Lock()

    async def write(self, cluster_dns: Sequence[str]) -> None:
        """Write the file if it changes. Raises nothing: a failure is logged."""
        async with self._lock:
            try:
                await finish_in_thread(partial(self._write, cluster_dns))
            except OSError as err:
                log.error(err, "Failed to write resolv.conf for --experimental-mounter-path", path=self._path)

    def _write(self, cluster_dns: Sequence[str]) -> None:
        try:
            host = Path(self._host).read_text(errors="surrogateescape") if self._host else ""
            text = mounter_resolv_conf(cluster_dns, host)
        except (OSError, ContainerConfigError) as err:
            log.error(err, "Failed to read search domains for --experimental-mounter-path", path=self._host)
            text = mounter_resolv_conf(cluster_dns, "")
        write_if_changed(self._path, text.encode(errors="surrogateescape"))


def mounter_resolv_conf(cluster_dns: Sequence[str], host: str) -> str:
    """Return the resolv.conf of a mounter: the cluster's name servers and the host's search domains.

    Raises ContainerConfigError for a malformed resolv.conf of the host.
    """
    servers = "".join(f"nameserver {address}\n" for address in cluster_dns)
    searches = " ".join(("search", *parse_resolv_conf(host).searches))
    return f"{servers}{searches}\n" if host else servers
