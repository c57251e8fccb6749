"""Wrong usage of `pykubelet`: one line, with the help that explains it."""

import subprocess

import pytest

from tests.support.cli_node import PYKUBELET, environment


def pykubelet(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [PYKUBELET, *arguments], capture_output=True, text=True, check=False, env=environment()
    )


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (("nope",), "pykubelet: No such command 'nope'; see `pykubelet --help`"),
        (("ps", "--nope"), "pykubelet ps: No such option: --nope; see `pykubelet ps --help`"),
        (("logs",), "pykubelet logs: Missing argument 'pod'; see `pykubelet logs --help`"),
        (
            ("exec", "web", "ls", "-l"),
            "pykubelet exec: No such option: -l; if it belongs to the command, write -- before the command; "
            "see `pykubelet exec --help`",
        ),
        (
            ("events", "--node", "web"),
            "pykubelet events: Invalid value: --node shows the node, not a pod: leave out one of the two; "
            "see `pykubelet events --help`",
        ),
        (("ps", "\x1b]0;x\x07"), "\\x1b]0;x\\x07"),
    ],
)
def test_pykubelet_wrong_usage_is_one_line_and_exits_2(arguments: tuple[str, ...], line: str) -> None:
    done = pykubelet(*arguments)
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1)
    assert line in done.stderr
    assert "\x1b" not in done.stderr


@pytest.mark.parametrize("arguments", [(), ("images",), ("config",)])
def test_pykubelet_without_command_prints_help_and_exits_2(arguments: tuple[str, ...]) -> None:
    done = pykubelet(*arguments)
    assert done.returncode == 2
    assert "Usage: pykubelet" in done.stdout + done.stderr
    assert "Traceback" not in done.stderr
