"""Completion scripts in their shells, and man pages in groff."""

import asyncio
import shutil
import subprocess
from pathlib import Path

import pytest

from pykubelet.cli.command_tree import command_tree
from pykubelet.cli.completion import SHELLS, names, script
from pykubelet.cli.manpages import write_pages
from pykubelet.cli.options import NodeSelection
from pykubelet.standalone.instance import Instance
from tests.support.cli_node import answering
from tests.support.pod_view import ScriptedView, pod_of

DRIVER = """
source "$1"; shift
pykubelet() { echo from-node-"$*"; }
command() { "$@"; }
COMP_WORDS=("$@"); COMP_CWORD=$((${#COMP_WORDS[@]} - 1)); COMPREPLY=()
"_$([[ $1 == kubelet ]] && echo pykubelet_kubelet || echo pykubelet)"
printf '%s\\n' "${COMPREPLY[@]}"
"""


@pytest.fixture(scope="module")
def bash_script(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("completion") / "script"
    path.write_text(script("bash"))
    return path


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        (("pykubelet", "ev"), {"events"}),
        (("pykubelet", "config", "re"), {"reload"}),
        (("pykubelet", "ps", "--wa"), {"--watch"}),
        (("pykubelet", "ps", "-o", "y"), {"yaml"}),
        (("pykubelet", "self"), {"self-test"}),
        (("pykubelet", "self-test", "-o", "j"), {"json"}),
        (("pykubelet", "pressure", "-o", "w"), {"wide"}),
        (("pykubelet", "completion", "z"), {"zsh"}),
        (("pykubelet", "ps", "--data-dir", "/d", "--root"), {"--root-dir"}),
        (("kubelet", "--max-p"), {"--max-pods"}),
    ],
)
def test_bash_completion_commands_options_values(
    bash_script: Path, line: tuple[str, ...], expected: set[str]
) -> None:
    assert _completed(bash_script, *line) == expected


def test_bash_completion_pods_and_containers_ask_the_selected_node(bash_script: Path) -> None:
    assert "from-node-__complete" in _completed(bash_script, "pykubelet", "logs", "")
    assert "from-node-__complete" in _completed(bash_script, "pykubelet", "debug", "")
    for words in (
        ("logs", "--data-dir", "/d", "web", "-c"),
        ("debug", "--data-dir", "/d", "web", "--target"),
    ):
        found = _completed(bash_script, "pykubelet", *words, "")
        assert {"--data-dir", "/d", "containers", "web"} <= found


def _completed(script_file: Path, *line: str) -> set[str]:
    done = subprocess.run(
        ["bash", "-c", DRIVER, "bash", str(script_file), *line], capture_output=True, text=True, check=True
    )
    assert done.stderr == ""
    return {word for word in done.stdout.split("\n") if word}


@pytest.mark.parametrize("shell", SHELLS)
def test_completion_script_has_every_command_and_is_valid(shell: str) -> None:
    text = script(shell)
    for command in command_tree().walk():
        assert all(part in text for part in command.path)
    if program := shutil.which(shell):
        done = subprocess.run([program, "-n"], input=text, capture_output=True, text=True, check=False)
        assert (done.returncode, done.stderr) == (0, "")


async def test_names_of_pods_and_containers_without_hostile_ones(data_dir: Path) -> None:
    (data_dir / "kubelet").mkdir(parents=True)
    selection = NodeSelection(data_dir)
    hostile = pod_of("x$(reboot)", "u2", node="")
    assert names(selection, "pods", None) == []
    async with answering(Instance.at(data_dir), ScriptedView(listed=[pod_of("web", "u1"), hostile])):
        assert await asyncio.to_thread(names, selection, "pods", None) == ["web"]
        assert await asyncio.to_thread(names, selection, "containers", "web") == ["main"]
        assert await asyncio.to_thread(names, selection, "containers", "none") == []
        assert await asyncio.to_thread(names, selection, "other", None) == []


def test_man_pages_one_per_command_without_warnings_of_groff(tmp_path: Path) -> None:
    pages = write_pages(tmp_path)
    assert {page.name for page in pages} >= {"pykubelet.1", "pykubelet-config-reload.1", "kubelet.8"}
    assert len(pages) == len(list(command_tree().walk())) + 1
    if groff := shutil.which("groff"):
        for page in pages:
            command = [groff, "-man", "-Tutf8", "-ww", str(page)]
            done = subprocess.run(command, capture_output=True, text=True, check=True)
            assert done.stderr == ""
            assert "kubelet" in done.stdout
