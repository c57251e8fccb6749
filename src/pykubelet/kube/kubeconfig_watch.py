"""A kubeconfig that somebody replaces while the agent runs, because what it holds has expired.

Files that it names are looked at with every request; what is written in it (a token, certificates) would
be in use until the agent ends. So the file itself is looked at now and then: who the agent is, and whom
it trusts, follows it; where the API server is does not, since everything hangs on that.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

from pykubelet.kube.access import Access
from pykubelet.kube.credentials import CredentialSource
from pykubelet.kube.errors import KubeconfigError
from pykubelet.logs import get_logger

log = get_logger(__name__)

LOOK_SECONDS = 10.0


async def follow_kubeconfig(
    path: Path, load: Callable[[Path], Access], access: Access, credentials: CredentialSource
) -> NoReturn:
    """Have the credentials follow the file until cancelled; `access` is what they were made of."""
    seen: tuple[int, ...] | None = None
    while True:
        await asyncio.sleep(LOOK_SECONDS)
        mark = _look(path)
        if mark is not None and mark != seen:
            seen = mark
            access = _taken(path, load, access, credentials)


def _taken(
    path: Path, load: Callable[[Path], Access], access: Access, credentials: CredentialSource
) -> Access:
    try:
        found = load(path)
    except KubeconfigError as err:
        log.error(err, "Failed to use the changed kubeconfig, keeping what was read before")
        return access
    if found == access:
        return access
    if _place(found) != _place(access):
        log.warning(
            "The kubeconfig names another way to the API server now: restart the agent to use it",
            path=str(path),
            server=found.server,
        )
        return access
    log.info("The kubeconfig has changed, using its credentials", path=str(path))
    credentials.use(found)
    return found


def _place(access: Access) -> tuple[object, ...]:
    return access.server, access.tls_server_name, access.proxy, access.compression


def _look(path: Path) -> tuple[int, ...] | None:
    """Give what tells one version of the file from another; None while it is not there."""
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns
