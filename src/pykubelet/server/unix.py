"""A server on a Unix socket that only its owner can open.

The socket has its mode before it has its name, so there is no moment at which others get in. It
takes its place by renaming, which replaces what an agent that was killed left behind; a socket that
somebody still answers on is left alone.
"""

from __future__ import annotations

import asyncio
import errno
import os
import socket
import stat
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager, suppress
from pathlib import Path

from aiohttp import web

from pykubelet.cri.endpoint import MAX_PATH_BYTES
from pykubelet.logs import get_logger
from pykubelet.server.http import PortError
from pykubelet.server.nameless import nameless

log = get_logger(__name__)

_MODE = 0o600
_SHUTDOWN_SECONDS = 2.0


@asynccontextmanager
async def unix_server(path: Path, routes: Iterable[web.AbstractRouteDef]) -> AsyncIterator[None]:
    """Serve the routes on a socket at `path` while inside; its folder must exist.

    Raises PortError when that is impossible: one line with the cause and a remedy.
    """
    app = web.Application(client_max_size=64 * 1024)
    app.add_routes(routes)
    runner = web.AppRunner(
        app, access_log=None, handle_signals=False, keepalive_timeout=30, shutdown_timeout=_SHUTDOWN_SECONDS
    )
    await runner.setup()
    assert runner.server is not None
    nameless(runner.server)
    try:
        listener = _listen(path)
        identity = path.lstat()
        server = await asyncio.get_running_loop().create_unix_server(runner.server, sock=listener)
        log.info("Listening", server="control", path=str(path))
        try:
            yield
        finally:
            server.close()
            with suppress(OSError):
                # Whoever came after us may have put their own socket there.
                if os.path.samestat(identity, path.lstat()):
                    path.unlink()
    finally:
        await runner.cleanup()


def _listen(path: Path) -> socket.socket:
    aside = path.with_name(f".{path.name}")
    if len(os.fsencode(aside)) > MAX_PATH_BYTES:
        allowed = MAX_PATH_BYTES - 1
        raise PortError(
            f"the path of the control socket {path} is too long (at most {allowed} bytes): "
            "choose a shorter --root-dir or --data-dir"
        )
    _refuse_if_taken(path)
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        os.fchmod(listener.fileno(), _MODE)
        aside.unlink(missing_ok=True)
        listener.bind(str(aside))
        listener.listen(128)
        listener.setblocking(False)
        aside.replace(path)
    except OSError as err:
        listener.close()
        with suppress(OSError):
            aside.unlink()
        raise PortError(f"the control socket {path} cannot be made: {err.strerror or err}") from err
    return listener


def _refuse_if_taken(path: Path) -> None:
    try:
        mode = path.lstat().st_mode
    except OSError:
        return
    if not stat.S_ISSOCK(mode):
        raise PortError(f"the control socket {path} cannot be made: something else is there, remove it")
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.settimeout(1)
        try:
            probe.connect(str(path))
        except OSError as err:
            # A full queue or no answer in time means that somebody lives there, if busily.
            if err.errno not in (errno.EAGAIN, None):
                return
        raise PortError(f"another agent answers on {path}: stop that one first, or choose another --root-dir")
