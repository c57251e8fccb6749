"""From a loaded configuration to a running process and its exit code.

Both programs start the agent through here: logging, the flags in force, the permissions check,
signals, the event loop. A signal cancels the agent's task, and cancellation unwinds everything in
reverse order; a second signal ends the process at once, for people who do not want to wait.
Whatever goes wrong ends as one line on standard error and exit code 1.
"""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Awaitable, Callable, Iterator

import uvloop

from pykubelet.agent.host_setup import StartupError
from pykubelet.cli.errors import complain
from pykubelet.config.errors import ConfigError
from pykubelet.config.load import LoadedConfig
from pykubelet.linux import HostError
from pykubelet.linux.process_limits import is_root
from pykubelet.logs import get_logger
from pykubelet.logs.setup import configure, configure_early
from pykubelet.server.auth import AuthConfigError
from pykubelet.server.listeners import PortError
from pykubelet.standalone.instance import EmbeddedError
from pykubelet.transport.errors import CriError

log = get_logger(__name__)
EXPECTED = (AuthConfigError, ConfigError, CriError, EmbeddedError, HostError, PortError, StartupError)
"""Failures that are conditions of the machine or the input: no traceback."""


def launch(program: str, loaded: LoadedConfig, agent: Callable[[], Awaitable[None]]) -> int:
    """Run the agent in the foreground until it stops or is told to; returns the exit code."""
    configure_early()
    try:
        configure(loaded.log_options())
    except OSError as err:
        return complain(program, f"the log file cannot be opened: {err}; check --log-file and --log-dir")
    for warning in loaded.warnings:
        log.warning(warning)
    for name, value in loaded.flag_values.items():
        log.v(1).info(f'FLAG: --{name}="{value}"')
    if not is_root():
        return complain(program, "root is needed to manage containers: run it with sudo")
    try:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(_until_signal(agent))
    except BaseException as err:  # the boundary of the process: whatever it is, it becomes an exit code
        failures = list(_leaves(err))
        if all(isinstance(failure, asyncio.CancelledError) for failure in failures):
            return 0
        unexpected = [f for f in failures if not isinstance(f, (*EXPECTED, asyncio.CancelledError))]
        for failure in unexpected:
            log.exception(failure, "The agent failed: this is a bug, please report it")
        if not unexpected:
            complain(program, next(f for f in failures if isinstance(f, EXPECTED)))
        return 1
    return 0


async def _until_signal(agent: Callable[[], Awaitable[None]]) -> None:
    loop, task = asyncio.get_running_loop(), asyncio.current_task()
    assert task is not None
    seen: list[int] = []

    def on_signal(number: int) -> None:
        if seen:
            os._exit(1)
        seen.append(number)
        log.info(
            "Got a signal: stopping (a second one ends the process at once)",
            signal=signal.Signals(number).name,
        )
        task.cancel()

    numbers = (signal.SIGINT, signal.SIGTERM)
    for number in numbers:
        loop.add_signal_handler(number, on_signal, number)
    try:
        await agent()
    finally:
        for number in numbers:
            loop.remove_signal_handler(number)


def _leaves(err: BaseException) -> Iterator[BaseException]:
    if isinstance(err, BaseExceptionGroup):
        for inner in err.exceptions:
            yield from _leaves(inner)
    else:
        yield err
