"""Completion scripts in their shells, and man pages in groff."""

import asyncio
import contextlib
import shutil
import signal
import socket
import subprocess
import threading
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from pykubelet.cli import completion
from pykubelet.cli.command_tree import command_tree
from pykubelet.cli.completion import SHELLS, TIMEOUT_SECONDS, limit_time, names, script
from pykubelet.cli.exit_codes import EXIT_CODES
from pykubelet.cli.images import access
from pykubelet.cli.manpages import command_page, write_pages
from pykubelet.cli.node_access import Node
from pykubelet.cli.options import NodeSelection
from pykubelet.cri import runtime_pb2 as pb
from pykubelet.server.pods import SOCKET_NAME
from pykubelet.standalone.instance import Instance
from tests.support.cli_node import PYKUBELET, answering, environment
from tests.support.image_service import FakeImages
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


@pytest.mark.parametrize(
    ("line", "asked"),
    [
        (("rm", ""), ["objects"]),
        (("stop", "pod/a", ""), ["objects"]),
        (("start", ""), ["objects"]),
        (("get", ""), ["get"]),
        (("get", "deploy", ""), ["get", "deploy"]),
        (("images", "rm", ""), ["images"]),
        (("images", "save", "-o", "f", ""), ["images"]),
        (("images", "pull", ""), ["images"]),
        (("debug", "web", "--image", ""), ["images"]),
    ],
)
def test_bash_completion_objects_and_images_ask_the_node(
    bash_script: Path, line: tuple[str, ...], asked: list[str]
) -> None:
    found = _completed(bash_script, "pykubelet", *line)
    assert found == {"from-node-__complete", *asked}


def test_bash_completion_image_after_its_colon_is_completed_without_the_part_before(tmp_path: Path) -> None:
    file = tmp_path / "script"
    file.write_text(script("bash"))
    driver = DRIVER.replace(
        'echo from-node-"$*"', "echo reg:5000/web:1.0; echo reg:5000/web:2.0; echo docker.io/db:1"
    ).replace(
        "COMP_WORDS=", 'COMP_LINE="pykubelet images rm reg:5000/web:1"; COMP_POINT=${#COMP_LINE}; COMP_WORDS='
    )
    words = ["pykubelet", "images", "rm", "reg", ":", "5000/web", ":", "1"]
    done = subprocess.run(
        ["bash", "-c", driver, "bash", str(file), *words], capture_output=True, text=True, check=True
    )
    assert (done.stdout.split(), done.stderr) == (["1.0"], "")


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


async def test_names_of_objects_are_kinds_and_references_of_manifests(data_dir: Path) -> None:
    instance, selection = Instance.at(data_dir), NodeSelection(data_dir)
    instance.manifests.mkdir(parents=True)
    text = "apiVersion: v1\nkind: {}\nmetadata: {{name: {}, namespace: {}}}\n"
    (instance.manifests / "a.yaml").write_text(text.format("ConfigMap", "page", "default"))
    (instance.manifests / "b.yaml").write_text(text.format("Secret", "key", "prod"))
    (instance.manifests / "c.yaml").write_text("kind: [")
    assert names(selection, "objects", None) == ["configmap/page", "secret/prod/key"]
    found = names(selection, "get", None)
    assert {"pod", "deployment", "configmap/page", "secret/prod/key"} <= set(found)
    assert names(selection, "get", "secrets") == ["key"]
    assert names(selection, "get", "no-kind") == []


async def test_names_of_images_are_tags_without_hostile_ones(
    data_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runtime = FakeImages()
    for image in (
        pb.Image(id="sha256:aa", repo_tags=["reg:5000/web:1.0", "b/web:2"]),
        pb.Image(id="sha256:bb"),
        pb.Image(id="sha256:cc", repo_tags=["x$(reboot):1"]),
    ):
        runtime.present[image.id] = image

    @asynccontextmanager
    async def node_images(_: Node) -> AsyncIterator[Any]:
        yield SimpleNamespace(cri=SimpleNamespace(images=runtime))

    monkeypatch.setattr(access, "node_images", node_images)
    found = await asyncio.to_thread(names, NodeSelection(data_dir), "images", None)
    assert found == ["b/web:2", "reg:5000/web:1.0", "sha256:bb"]


@pytest.mark.parametrize("kind", ["pods", "objects", "get", "images"])
def test_complete_with_a_node_that_hangs_ends_after_a_second(data_dir: Path, kind: str) -> None:
    """Verify it for a node that accepts connections and sends its response byte by byte."""
    root = data_dir / "kubelet"
    root.mkdir(parents=True)
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(root / SOCKET_NAME))
        listener.listen()
        trickle = threading.Thread(target=_trickle, args=(listener,), daemon=True)
        trickle.start()
        started = time.monotonic()
        done = subprocess.run(
            [PYKUBELET, "__complete", "--root-dir", str(root), kind],
            capture_output=True,
            timeout=30,
            env=environment(),
        )
        took = time.monotonic() - started
    assert (done.returncode, done.stdout, done.stderr) == (0, b"", b"")
    assert took < 10  # a busy host starts a process slowly; the response takes much longer


def test_limit_time_is_a_second_from_the_start_of_the_process(monkeypatch: pytest.MonkeyPatch) -> None:
    handler = signal.getsignal(signal.SIGALRM)
    try:
        for age, expected in ((0.0, TIMEOUT_SECONDS), (0.6, 0.4), (5.0, 0.2)):
            monkeypatch.setattr(completion, "_process_age", lambda age=age: age)
            limit_time()
            assert signal.getitimer(signal.ITIMER_REAL)[0] == pytest.approx(expected, abs=0.05)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, handler)
    monkeypatch.undo()
    assert 0 < completion._process_age() < time.clock_gettime(time.CLOCK_BOOTTIME)


def _trickle(listener: socket.socket) -> None:
    with contextlib.suppress(OSError):
        connection = listener.accept()[0]
        for byte in b"HTTP/1.1 200 OK\r\nContent-Length: 1000\r\n\r\n" + b" " * 1000:
            connection.send(bytes([byte]))
            time.sleep(0.1)


def test_exit_codes_of_man_page_and_reference_are_the_same() -> None:
    man = " ".join(command_page(command_tree()).replace("\\-", "-").split())
    reference = (Path(__file__).parents[3] / "docs/reference/commands.md").read_text()
    for code, meaning in EXIT_CODES:
        assert f".B {code} {meaning.replace('`', '')}" in man
        assert f"| `{code}` | {meaning} |" in reference
    for word in ("Job", "`cp`", "`self-test`", "`doctor`"):
        assert word in dict(EXIT_CODES)["1"]


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
