"""Error output of commands, and their end by a signal."""

import os
import signal
import subprocess
import sys

import pytest

from pykubelet.cli.client import run_command
from pykubelet.cli.errors import print_error
from pykubelet.config.errors import ConfigError, Problem
from pykubelet.images.puller import PullFailed

HOSTILE = "\x1b]0;x\a"
SHOWN = "\\x1b]0;x\\x07"


@pytest.mark.parametrize(
    "err",
    [
        PullFailed(HOSTILE),
        ConfigError([Problem("a", HOSTILE)]),
        ConfigError([Problem(HOSTILE, "b"), Problem("a", HOSTILE)]),
        HOSTILE,
    ],
)
def test_print_error_control_characters_escaped(
    err: BaseException | str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert print_error("pykubelet x", err) == 1
    printed = capsys.readouterr().err
    assert SHOWN in printed
    assert "\x1b" not in printed


def test_print_error_keeps_lines(capsys: pytest.CaptureFixture[str]) -> None:
    print_error("p", "one of:\n  a\n  b")
    assert capsys.readouterr().err == "p: one of:\n  a\n  b\n"


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGHUP, 129)])
def test_run_command_ended_by_signal_unwinds(number: int, code: int) -> None:
    if signal.getsignal(number) is not signal.SIG_DFL:
        pytest.skip("the signal has another handler here (nohup)")
    unwound = []

    def work() -> int:
        try:
            run_command("p", lambda: 0)  # commands call others
            os.kill(os.getpid(), number)
            raise AssertionError("the signal had no effect")
        finally:
            unwound.append(True)

    with pytest.raises(SystemExit) as end:
        run_command("p", work)
    assert (end.value.code, unwound) == (code, [True])
    assert signal.getsignal(number) is signal.SIG_DFL


def test_run_command_ignored_signal_stays_ignored() -> None:
    program = (
        "import os, signal, sys\n"
        "from pykubelet.cli.client import run_command\n"
        "signal.signal(signal.SIGHUP, signal.SIG_IGN)\n"
        "sys.exit(run_command('p', lambda: os.kill(os.getpid(), signal.SIGHUP) or 7))\n"
    )
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 7
