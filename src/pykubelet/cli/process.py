"""Life cycle of a kubelet process: logging, root check, signals, event loop and exit code.

Both `kubelet` and `pykubelet up` start through `launch`. SIGINT and SIGTERM cancel the kubelet's task, and
cancellation unwinds all components in reverse order of their start; a second signal exits immediately. The
cancellation has a message, by which the kubelet distinguishes it from a failure (`--drain-on-stop`). SIGHUP
reloads the configuration; the one that the end of the terminal causes stops the kubelet like SIGTERM.
Every failure ends with exit code 1: an expected one as one line on standard error, any other one with a
logged traceback.
"""

from __future__ import annotations

import asyncio
import os
import signal
import termios
from collections.abc import Awaitable, Callable, Iterator, Sequence
from typing import TYPE_CHECKING

import uvloop

from pykubelet.agent.host_setup import StartupError
from pykubelet.cli.errors import print_error
from pykubelet.config.errors import ConfigError
from pykubelet.config.load import LoadedConfig
from pykubelet.linux import HostError
from pykubelet.linux.process_limits import is_root
from pykubelet.logs import get_logger
from pykubelet.logs.setup import configure, configure_early
from pykubelet.server.auth.request_auth import AuthConfigError
from pykubelet.server.listeners import PortError
from pykubelet.standalone.instance import EmbeddedError
from pykubelet.transport.errors import CriError
from pykubelet.util.tasks import WorkerPool

if TYPE_CHECKING:
    from pykubelet.agent.servers import HostProblem

log = get_logger(__name__)
EXPECTED = (AuthConfigError, ConfigError, CriError, EmbeddedError, HostError, PortError, StartupError)
"""Failures caused by the host or the input, reported without a traceback."""


def host_problems() -> Sequence[HostProblem]:
    """Return the findings of `doctor` about this host, for the page. Blocks."""
    # Imported here: only a page that is watched needs it.
    from pykubelet.cli.node.doctor import running_host_problems

    return running_host_problems()


def launch(
    program: str,
    loaded: LoadedConfig,
    agent: Callable[[], Awaitable[None]],
    *,
    on_hangup: Callable[[], None] | None = None,
) -> int:
    """Run the kubelet in the foreground until it ends or a signal arrives; return the exit code.

    `on_hangup` is called on SIGHUP, unless that is the end of the terminal.
    """
    configure_early()
    try:
        configure(loaded.log_options())
    except OSError as err:
        return print_error(program, f"the log file cannot be opened: {err}; check --log-file and --log-dir")
    for warning in loaded.warnings:
        log.warning(warning)
    for name, value in loaded.flag_values.items():
        log.v(1).info(f'FLAG: --{name}="{value}"')
    if not is_root():
        return print_error(program, "root is needed to manage containers: run it with sudo")
    try:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.get_loop().set_default_executor(WorkerPool())
            runner.run(_until_signal(agent, on_hangup))
    except BaseException as err:  # process boundary: every exception becomes an exit code
        failures = list(_leaves(err))
        if all(isinstance(failure, asyncio.CancelledError) for failure in failures):
            return 0
        unexpected = [f for f in failures if not isinstance(f, (*EXPECTED, asyncio.CancelledError))]
        for failure in unexpected:
            log.exception(failure, "Kubelet failed with an unexpected error, please report this bug")
        if not unexpected:
            print_error(program, next(f for f in failures if isinstance(f, EXPECTED)))
        return 1
    return 0


async def _until_signal(agent: Callable[[], Awaitable[None]], on_hangup: Callable[[], None] | None) -> None:
    loop, task = asyncio.get_running_loop(), asyncio.current_task()
    assert task is not None
    seen: list[int] = []

    def on_signal(number: int) -> None:
        if seen:
            os._exit(1)
        seen.append(number)
        log.info(
            "Received signal, stopping; a second signal exits immediately",
            signal=signal.Signals(number).name,
        )
        task.cancel("stopped by a signal")

    numbers = [signal.SIGINT, signal.SIGTERM]
    for number in numbers:
        loop.add_signal_handler(number, on_signal, number)
    if on_hangup is not None:
        terminals = [number for number in range(3) if os.isatty(number)]
        numbers.append(signal.SIGHUP)
        loop.add_signal_handler(
            signal.SIGHUP,
            lambda: on_signal(signal.SIGHUP) if any(map(_is_hung_up, terminals)) else on_hangup(),
        )
    try:
        await agent()
    finally:
        for number in numbers:
            loop.remove_signal_handler(number)


def _is_hung_up(terminal: int) -> bool:
    """Return whether a terminal has been closed on the other side."""
    try:
        termios.tcgetattr(terminal)
    except termios.error:
        return True
    return False


def _leaves(err: BaseException) -> Iterator[BaseException]:
    if isinstance(err, BaseExceptionGroup):
        for inner in err.exceptions:
            yield from _leaves(inner)
    else:
        yield err
