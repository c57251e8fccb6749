"""Every command of `pykubelet` in a terminal of 80x24, with right and wrong input.

The commands come from the application: one without a case fails. The cases run in order, because later ones
use what earlier ones created; the last one removes the node of `pykubelet up`. The drop-in `kubelet` runs the
same cases as far as it has the command.
"""

from __future__ import annotations

import json
import re
import signal
import subprocess
import tempfile
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from pykubelet.cli.command_tree import command_tree
from pykubelet.standalone.seed_images import BUSYBOX_IMAGE
from tests.support.cli_node import PYKUBELET, Terminal
from tests.support.data_dir import short_dir
from tests.support.manifests import container, pod
from tests.support.node import Node, kubelet_node, running, up_node
from tests.support.runtime import RunningRuntime

ESCAPES = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
USAGE = 2
INTERRUPTED = 130
CTRL_C = "\x03"
HIDE_CURSOR, SHOW_CURSOR = "\x1b[?25l", "\x1b[?25h"


@dataclass(frozen=True, slots=True)
class Case:
    """A command line, the regular expression of its first line, and its exit code.

    `keys` are typed when `until` was printed. `{tmp}` is a directory with files, `{data}` that of the node.
    """

    line: str
    first: str
    code: int | tuple[int, ...] = 0
    until: str = ""
    keys: str = ""


CASES = (
    Case("version", "Kubernetes v"),
    Case("version now", "pykubelet version: Got unexpected extra argument", USAGE),
    Case("ps", "No pods. `pykubelet run FILE` starts one"),
    Case("ps --sort x", "pykubelet ps: No such option: --sort; see `pykubelet ps --help`", USAGE),
    Case("run {tmp}/web.yaml", "web: handed to the node as {data}/manifests/web.yaml"),
    Case("run {tmp}/none.yaml", "pykubelet run: {tmp}/none.yaml cannot be read: No such file", 1),
    Case("run", "pykubelet run: Missing argument 'file'", USAGE),
    Case("apply {tmp}/conf.yaml", "configmap/conf created"),
    Case("apply {tmp}/broken.yaml", "pykubelet apply: {tmp}/broken.yaml: holds characters that YAML", 1),
    Case("apply http://127.0.0.1:abc/x", "pykubelet apply: http://127.0.0.1:abc/x cannot be fetched", 1),
    Case("get", "KIND .*FILE"),
    Case("get deploy/none", "pykubelet get: there is no deploy 'none'", 1),
    Case("get nonsense", "pykubelet get: 'nonsense' is not a kind of a manifest", 1),
    Case("ps -o name", "pod/default/web-n1"),
    Case("describe pod/default/web-n1", "Name: +web-n1"),
    Case("describe none", "pykubelet describe: there is no pod 'none'; there are:", 1),
    Case("logs web", "hello"),
    Case("logs web -c none", "pykubelet logs: pod web-n1 has no container 'none'; it has: main", 1),
    Case("logs web --since soon", "pykubelet logs: Invalid value for --since: 'soon'", USAGE),
    Case("logs -f web", "hello", INTERRUPTED, "hello", CTRL_C),
    Case("exec web -- sh -c 'echo out; exit 7'", "out", 7),
    Case("exec -it web -- sh", "BusyBox", 5, "# ", "exit 5\r"),
    Case(
        "exec web ls -l", "pykubelet exec: No such option: -l; if it belongs to the command, write --", USAGE
    ),
    Case("exec none -- true", "pykubelet exec: there is no pod 'none'", 1),
    Case("attach web", "tick", INTERRUPTED, "tick", CTRL_C),
    Case("attach web -c none", "pykubelet attach: pod web-n1 has no container 'none'", 1),
    Case("debug web -- true", "Container debugger-.* of pod web-n1"),
    Case("debug web", "pykubelet debug: Invalid value: add -it for a shell", USAGE),
    Case("debug none -- true", "pykubelet debug: there is no pod 'none'", 1),
    Case("cp web:/etc/passwd {tmp}", "1 file, "),
    Case("cp web:/none {tmp}", "pykubelet cp: cannot copy /none: No such file or directory", 1),
    Case("cp a b", "pykubelet cp: one of the two paths is POD:PATH", 1),
    Case("port-forward web :80", "Forwarding from 127.0.0.1:", INTERRUPTED, "Forwarding", CTRL_C),
    Case("port-forward web x", "pykubelet port-forward: cannot forward port 'x'", 1),
    Case("port-forward --address a..b web :80", "pykubelet port-forward: cannot listen on a..b", 1),
    Case("top", "Node n1: CPU|NAME "),
    Case("top --interval 0s -w", "pykubelet top: Invalid value for --interval: '0s'", USAGE),
    Case("top none", "pykubelet top: there is no pod 'none'", 1),
    Case("events web", "LAST SEEN "),
    Case("events -f web", r"[\d:]+ +Normal", INTERRUPTED, "Started", CTRL_C),
    Case("events none", "pykubelet events: there is no pod 'none'", 1),
    Case("events --node web", "pykubelet events: Invalid value: --node shows the node", USAGE),
    Case("restart web", "Restarting main of web-n1 in place"),
    Case("restart web none", "pykubelet restart: pod web-n1 has no container 'none'", 1),
    Case("images ls", "IMAGE "),
    Case("images ls none", "pykubelet images ls: there is no image 'none'", 1),
    Case("images pull 127.0.0.1:1/none:1", ".*Pulling 127.0.0.1:1/none:1", 1),
    Case("images pull", "pykubelet images pull: Missing argument 'image'", USAGE),
    Case("images save {image} -o {tmp}/i.tar", "Saved {image}"),
    Case("images save {image} -o {tmp}/i.tar", "pykubelet images save: {tmp}/i.tar exists: give --force", 1),
    Case("images load {tmp}/i.tar", ".*Checking {tmp}/i.tar"),
    Case("images load -", "pykubelet images load: standard input is a terminal: give a file", 1),
    Case("images pin {image}", "{image} (pinned|was already pinned)"),
    Case("images pin none", "pykubelet images pin: there is no image 'none'", 1),
    Case("images unpin {image}", "{image} unpinned"),
    Case("images unpin none", "pykubelet images unpin: there is no image 'none'", 1),
    Case("images rm {image}", "pykubelet images rm: {image} was not removed: used by default/web-n1", 1),
    Case("images rm", "pykubelet images rm: Missing argument 'IMAGE...'", USAGE),
    Case("images prune --dry-run", "No unused images to remove"),
    Case("images prune now", "pykubelet images prune: Got unexpected extra argument", USAGE),
    Case("login -u me --no-check registry.example", "Password: ", 0, "Password", "secret\r"),
    Case("login -u me --no-check 'no registry'", "pykubelet login: 'no registry' is not a registry", 1),
    Case("logout registry.example", "Removed the credentials of registry.example"),
    Case("logout registry.example", "pykubelet logout: .* has no credentials of registry.example", 1),
    Case("stop web", "pod/web stopped"),
    Case("stop none", "pykubelet stop: there is no manifest and no object 'none'", 1),
    Case("start web", "pod/web started"),
    Case("start none", "pykubelet start: there is no manifest and no object 'none'", 1),
    Case("rm conf", "configmap/conf removed"),
    Case("rm conf", "pykubelet rm: there is no manifest and no object 'conf'", 1),
    Case("pressure", "Node conditions: "),
    Case("pressure now", "pykubelet pressure: Got unexpected extra argument", USAGE),
    Case("certs", "No certificates: "),
    Case("certs --warn soon", "pykubelet certs: Invalid value for --warn: 'soon'", USAGE),
    Case("doctor", "┏━+", (0, 1)),
    Case("doctor --root-dir /none", "pykubelet doctor: there is no directory /none", 1),
    Case("config print --max-pods=7", "warning: these flags belong in the configuration file"),
    Case("config print --max-pods=x", "pykubelet config print: --max-pods: 'x' is not a whole number", 1),
    Case("config validate {data}/kubelet.yaml", "{data}/kubelet.yaml: ok"),
    Case("config validate {tmp}/web.yaml", "{tmp}/web.yaml: 2 problems:", 1),
    Case("config convert-flags --max-pods=7", "apiVersion: kubelet.config.k8s.io/v1beta1"),
    Case("config convert-flags --none", "pykubelet config convert-flags: --none: there is no such flag", 1),
    Case("config reload", "Nothing has changed."),
    Case("config reload now", "pykubelet config reload: Got unexpected extra argument", USAGE),
    Case("completion bash", "# Completion of pykubelet and kubelet for bash."),
    Case("completion tcsh", "pykubelet completion: Invalid value for 'shell'", USAGE),
    Case("support-bundle -o {tmp}/b", r"{tmp}/b: \d+ files, .*; look through it before you share it"),
    Case("support-bundle -o {tmp}/b", "pykubelet support-bundle: {tmp}/b exists: name a new file", 1),
    Case("self-test", "ok +start "),
    Case("self-test --timeout soon", "pykubelet self-test: Invalid value for --timeout: 'soon'", USAGE),
    Case("up", "pykubelet up: pykubelet is already running with pid", 1),
    Case("up --install --uninstall", "pykubelet up: Invalid value: --install and --uninstall exclude", USAGE),
    Case("dev cluster status", "There is no cluster in {tmp}/dev: make one with", 1),
    Case("dev cluster up --port 0", "pykubelet dev cluster up: Invalid value for '--port'", USAGE),
    Case("dev cluster down now", "pykubelet dev cluster down: Got unexpected extra argument", USAGE),
    Case("none", "pykubelet: No such command 'none'; see `pykubelet --help`", USAGE),
    Case("down --volumes --keep-data", "pykubelet down: Invalid value: --volumes deletes", USAGE),
    Case("down", "Stopping the agent with pid"),
)


NOT_ON_DROP_INS = ("up", "down", "dev", "images unpin {image}")
"""Commands of another kind of node, and a pin that the runtime's other users need."""


@pytest.fixture(scope="module")
def node() -> Iterator[Node]:
    with short_dir() as path, running(up_node(path)) as started:
        yield started  # the last case removes it


@pytest.fixture
def drop_in(runtime: RunningRuntime) -> Iterator[Node]:
    with tempfile.TemporaryDirectory(prefix="pyk-", dir="/tmp") as root:
        with running(kubelet_node(runtime, root=Path(root))) as started:
            yield started
            started.clear()
        # The kubelet mounts its root directory on itself.
        subprocess.run(["umount", root], check=False, capture_output=True)


def test_cases_cover_every_command() -> None:
    commands = [" ".join(found.path) for found in command_tree().walk() if not found.commands]
    missing = [
        command
        for command in commands
        if not any(f"{case.line} ".startswith(f"{command} ") for case in CASES)
    ]
    assert missing == [], "add a case with right and one with wrong input"


@pytest.mark.machine
async def test_every_command_in_a_terminal(node: Node, tmp_path: Path) -> None:
    await run_cases(CASES, node, f"PYKUBELET_DATA_DIR={node.instance.data_dir}", tmp_path)


@pytest.mark.machine
async def test_every_command_in_a_terminal_on_a_drop_in(drop_in: Node, tmp_path: Path) -> None:
    cases = [case for case in CASES if not case.line.startswith(NOT_ON_DROP_INS)]
    await run_cases(cases, drop_in, f"PYKUBELET_ROOT_DIR={drop_in.root}", tmp_path)


async def run_cases(cases: Iterable[Case], node: Node, variable: str, tmp_path: Path) -> None:
    script = "echo hello; while sleep 1; do echo tick; done"
    web = pod("web", container(command=["sh", "-c", script], image=BUSYBOX_IMAGE))
    web["spec"]["terminationGracePeriodSeconds"] = 0
    (tmp_path / "web.yaml").write_text(json.dumps(web))
    conf = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "conf"}, "data": {"a": "1"}}
    (tmp_path / "conf.yaml").write_text(json.dumps(conf))
    (tmp_path / "broken.yaml").write_text("kind: Pod\n\x1b")
    for case in cases:
        code, said = await recorded(case, node, variable, tmp_path)
        lines = [line for line in ESCAPES.sub("", said).replace("\r", "").split("\n") if line.strip()]
        first = case.first.format(tmp=tmp_path, data=node.instance.data_dir, image=BUSYBOX_IMAGE)
        assert lines, case
        assert re.match(first, lines[0]), (case, said)
        assert code in (case.code if isinstance(case.code, tuple) else (case.code,)), (case, said)
        assert "Traceback" not in said, (case, said)
        assert said.rfind(HIDE_CURSOR) <= said.rfind(SHOW_CURSOR), (case, said)


async def recorded(case: Case, node: Node, variable: str, directory: Path) -> tuple[int, str]:
    """Run a command in a terminal; return its exit code and what it printed."""
    line = case.line.format(tmp=directory, data=node.instance.data_dir, image=BUSYBOX_IMAGE)
    variables = f"{variable} PYKUBELET_DEV_DATA_DIR={directory}/dev"
    shell = f"unset COLUMNS; cd {directory}; {variables} exec {PYKUBELET} {line}"
    terminal = Terminal(["/bin/sh", "-c", shell], rows=24, columns=80)
    try:
        if case.until:
            await terminal.until(case.until)
            terminal.type(case.keys)
        await terminal.read_all()
    except BaseException:
        terminal.signal(signal.SIGKILL)
        await terminal.end()
        raise
    code = await terminal.end()
    # A command that a signal ends has the code that a shell reports.
    return code if code >= 0 else 128 - code, terminal.said.decode(errors="replace")
