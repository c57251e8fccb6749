"""`pykubelet logs`: which run is meant and whether more is to come, as tables; the command on real files."""

import asyncio
import gzip
import signal
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from pykubelet.api.pod import Pod
from pykubelet.cli.node_access import Node
from pykubelet.cli.pods.logs import (
    LogNotFound,
    LogOutlook,
    find_attempt,
    log_file,
    log_outlook,
    pods_with_logs,
)
from pykubelet.standalone.instance import Instance
from tests.support.cli_node import answering, command, environment, pykubelet
from tests.support.pod_view import ScriptedView, pod_of

RUN: dict[str, Any] = {"running": {}}
ENDED: dict[str, Any] = {"terminated": {"exitCode": 0, "reason": "Completed"}}
FAILED: dict[str, Any] = {"terminated": {"exitCode": 1, "reason": "Error"}}
CREATING: dict[str, Any] = {"waiting": {"reason": "ContainerCreating"}}
CRASHING: dict[str, Any] = {"waiting": {"reason": "CrashLoopBackOff"}}


def made(
    state: dict[str, Any] | None,
    restarts: int = 0,
    last: dict[str, Any] | None = None,
    *,
    policy: str = "Always",
    phase: str = "Running",
    init: bool = False,
    sidecar: bool = False,
) -> Pod:
    status = [{"name": "main", "state": state, "lastState": last or {}, "restartCount": restarts}]
    spec: dict[str, Any] = {"restartPolicy": policy}
    if init:
        spec["initContainers"] = [{"name": "main"} | ({"restartPolicy": "Always"} if sidecar else {})]
        spec["containers"] = [{"name": "other"}]
    kind = "initContainerStatuses" if init else "containerStatuses"
    return pod_of(
        "p", "u", spec=spec, status={"phase": phase} | ({kind: status} if state is not None else {})
    )


@pytest.mark.parametrize(
    ("pod", "runs", "current", "previous"),
    [
        (made(RUN), 1, 0, None),
        (made(RUN, 2, FAILED), 3, 2, 1),
        (made(FAILED), 1, 0, None),
        (made(FAILED, 1, FAILED), 2, 1, 0),
        (made(CRASHING, 0, FAILED), 1, 0, 0),
        (made(CRASHING, 3, FAILED), 4, 3, 3),
        (made(CREATING), 0, None, None),
        (made(CREATING), 1, 0, None),
        (made(None), 0, None, None),
        (made(None), 3, 2, 1),
    ],
)
def test_find_attempt_current_and_previous(
    pod: Pod, runs: int, current: int | None, previous: int | None
) -> None:
    for wanted, before in ((current, False), (previous, True)):
        if wanted is None:
            with pytest.raises(LogNotFound):
                find_attempt(pod, "main", before, runs)
        else:
            assert find_attempt(pod, "main", before, runs) == wanted


def test_find_attempt_container_not_started_error_has_reason() -> None:
    with pytest.raises(LogNotFound, match="has not started yet: ContainerCreating"):
        find_attempt(made(CREATING), "main", False, 0)


@pytest.mark.parametrize(
    ("pod", "state", "outlook"),
    [
        (None, "", "over"),
        (made(RUN), "syncing", "writing"),
        (made(RUN), "terminating", "writing"),
        (made(None), "syncing", "later"),
        (made(None), "terminating", "over"),
        (made(CREATING), "syncing", "later"),
        (made(CRASHING, 0, FAILED), "syncing", "later"),
        (made(CRASHING, 0, FAILED), "terminating", "over"),
        (made(RUN, 1, FAILED), "syncing", "next"),
        (made(ENDED), "syncing", "later"),
        (made(ENDED, policy="OnFailure"), "syncing", "over"),
        (made(FAILED, policy="OnFailure"), "syncing", "later"),
        (made(FAILED, policy="Never"), "syncing", "over"),
        (made(FAILED, phase="Failed"), "syncing", "over"),
        (made(ENDED, init=True), "syncing", "over"),
        (made(FAILED, init=True), "syncing", "later"),
        (made(FAILED, init=True, policy="Never"), "syncing", "over"),
        (made(ENDED, init=True, sidecar=True, policy="Never"), "syncing", "later"),
    ],
)
def test_log_outlook_by_pod_state(pod: Pod | None, state: str, outlook: LogOutlook) -> None:
    containers = [*pod.spec.init_containers, *pod.spec.containers] if pod else made(RUN).spec.containers
    assert log_outlook(pod, state, containers[0], 0) == outlook


@pytest.fixture
def instance(data_dir: Path) -> Instance:
    (data_dir / "kubelet").mkdir(parents=True)
    return Instance.at(data_dir)


def write(
    instance: Instance, pod: Pod, attempt: int, *texts: str, container: str = "main", age: int = 0
) -> None:
    path = log_file(Node.of(instance), pod, container, attempt)
    path.parent.mkdir(parents=True, exist_ok=True)
    stamp = (datetime.now(UTC) - timedelta(seconds=age)).isoformat().replace("+00:00", "Z")
    with path.open("a") as file:
        for text in texts:
            stream = "stderr" if text.startswith("!") else "stdout"
            file.write(f"{stamp} {stream} {'P' if text.endswith('~') else 'F'} {text.rstrip('~')}\n")


async def test_pykubelet_logs_streams_separated_and_partial_lines_joined(instance: Instance) -> None:
    pod = made(RUN)
    write(instance, pod, 0, "one", "!bad", "two beg~", "!worse", "ins")
    async with answering(instance, ScriptedView([pod])):
        ran = await pykubelet(instance, "logs", "p")
        assert (ran.code, ran.out, ran.err) == (0, "one\ntwo begins\n", "!bad\n!worse\n")
        ran = await pykubelet(instance, "logs", "p", "--tail", "1")
        assert (ran.out, ran.err) == ("two begins\n", "")
        ran = await pykubelet(instance, "logs", "p", "--tail", "0")
        assert (ran.out, ran.err) == ("", "")
        ran = await pykubelet(instance, "logs", "p", "--timestamps", "--tail", "1")
        stamp, _, rest = ran.out.partition(" ")
        assert rest == "two begins\n"
        assert len(stamp) == len("2026-01-02T03:04:05.123456789Z")


async def test_pykubelet_logs_since_prints_newer_lines_only(instance: Instance) -> None:
    pod = made(RUN)
    write(instance, pod, 0, "old", age=120)
    write(instance, pod, 0, "new")
    async with answering(instance, ScriptedView([pod])):
        assert (await pykubelet(instance, "logs", "p", "--since", "1m")).out == "new\n"
        assert (await pykubelet(instance, "logs", "p", "--since", "1h")).out == "old\nnew\n"
        ran = await pykubelet(instance, "logs", "p", "--since", "5")
        assert ran.code == 2
        assert "has no unit" in ran.err


async def test_pykubelet_logs_rotated_files_read_with_since_and_tail(instance: Instance) -> None:
    pod = made(RUN)
    path = log_file(Node.of(instance), pod, "main", 0)
    for number, text in enumerate(("first", "second")):
        write(instance, pod, 0, text, age=600)
        path.rename(path.with_name(f"0.log.2026010{number + 1}-000000"))
    oldest = path.with_name("0.log.20260101-000000")
    path.with_name(f"{oldest.name}.gz").write_bytes(gzip.compress(oldest.read_bytes()))
    oldest.unlink()
    write(instance, pod, 0, "third")
    async with answering(instance, ScriptedView([pod])):
        assert (await pykubelet(instance, "logs", "p")).out == "third\n"
        assert (await pykubelet(instance, "logs", "p", "--since", "1h")).out == "first\nsecond\nthird\n"
        assert (await pykubelet(instance, "logs", "p", "--tail", "2")).out == "second\nthird\n"
        assert (await pykubelet(instance, "logs", "p", "--tail", "9")).out == "first\nsecond\nthird\n"
        path.unlink()
        assert (await pykubelet(instance, "logs", "p")).out == "second\n"


async def test_pykubelet_logs_previous_prints_previous_attempt(instance: Instance) -> None:
    pod = made(RUN, 1, FAILED)
    write(instance, pod, 0, "first")
    write(instance, pod, 1, "second")
    async with answering(instance, ScriptedView([pod])):
        assert (await pykubelet(instance, "logs", "p")).out == "second\n"
        assert (await pykubelet(instance, "logs", "-p", "p")).out == "first\n"
        log_file(Node.of(instance), pod, "main", 0).unlink()
        ran = await pykubelet(instance, "logs", "-p", "p")
        assert (ran.code, ran.err) == (1, "pykubelet logs: the log of run 0 of container main was removed\n")


async def test_pykubelet_logs_without_container_prints_default_container_name(instance: Instance) -> None:
    pod = made(RUN, init=True)
    write(instance, pod, 0, "from other", container="other")
    write(instance, pod, 0, "from main")
    async with answering(instance, ScriptedView([pod])):
        ran = await pykubelet(instance, "logs", "p")
        assert (ran.out, ran.err) == (
            "from other\n",
            "Container other of other, main (choose another with -c)\n",
        )
        assert (await pykubelet(instance, "logs", "p", "-c", "main")).out == "from main\n"


async def test_pykubelet_logs_kubelet_not_running_reads_files(instance: Instance) -> None:
    pod = made(RUN)
    write(instance, pod, 0, "first")
    write(instance, pod, 1, "second")
    assert [(one.full_name, one.uid) for one in pods_with_logs(Node.of(instance))] == [
        ("default/p-node1", "u")
    ]
    assert (await pykubelet(instance, "logs", "p-node1")).out == "second\n"
    assert (await pykubelet(instance, "logs", "-p", "p-node1")).out == "first\n"
    ran = await pykubelet(instance, "logs", "-f", "p-node1")
    assert ran.code == 1
    assert "no node runs on" in ran.err


async def test_pykubelet_logs_kubelet_not_running_no_logs_exits_1(instance: Instance) -> None:
    ran = await pykubelet(instance, "logs", "p")
    assert (ran.code, ran.out) == (1, "")
    assert "start it with `pykubelet up" in ran.err


@asynccontextmanager
async def following(instance: Instance, *arguments: str) -> AsyncIterator[Process]:
    process = await asyncio.create_subprocess_exec(
        *command(instance, "logs", "-f", *arguments), stdout=PIPE, stderr=PIPE, env=environment()
    )
    try:
        async with asyncio.timeout(60):
            yield process
    finally:
        if process.returncode is None:
            process.kill()
        await process.communicate()


async def said(process: Process, *lines: str) -> None:
    assert process.stdout is not None
    for line in lines:
        assert (await process.stdout.readline()).decode() == f"{line}\n"


async def test_pykubelet_logs_follow_container_restart_until_pod_failed(instance: Instance) -> None:
    view = ScriptedView([made(RUN)])
    write(instance, view.listed[0], 0, "old", "one")
    async with answering(instance, view), following(instance, "p", "--tail", "1") as process:
        await said(process, "one")
        write(instance, view.listed[0], 0, "two")
        await said(process, "two")
        view.listed = [made(CRASHING, 0, FAILED)]
        await asyncio.sleep(1.5)
        write(instance, view.listed[0], 1, "three")
        view.listed = [made(RUN, 1, FAILED)]
        await said(process, "three")
        write(instance, view.listed[0], 1, "four")
        await said(process, "four")
        view.listed = [made(FAILED, 1, FAILED, phase="Failed")]
        assert await process.wait() == 0


async def test_pykubelet_logs_follow_container_not_started_waits(instance: Instance) -> None:
    view = ScriptedView([made(CREATING, phase="Pending")])
    async with answering(instance, view), following(instance, "p") as process:
        await asyncio.sleep(1)
        write(instance, view.listed[0], 0, "hello")
        view.listed = [made(RUN)]
        await said(process, "hello")
        view.listed = []
        assert await process.wait() == 0


async def test_pykubelet_logs_follow_pod_already_succeeded_prints_log(instance: Instance) -> None:
    view = ScriptedView([made(ENDED, phase="Succeeded", policy="Never")])
    write(instance, view.listed[0], 0, "quick")
    async with answering(instance, view), following(instance, "p") as process:
        await said(process, "quick")
        assert await process.wait() == 0


async def test_pykubelet_logs_sigint_and_closed_pipe_print_no_error(instance: Instance) -> None:
    view = ScriptedView([made(RUN)])
    write(instance, view.listed[0], 0, "one")
    async with answering(instance, view):
        async with following(instance, "p") as process:
            await said(process, "one")
            process.send_signal(signal.SIGINT)
            _, err = await process.communicate()
            assert (process.returncode, err) == (130, b"")
        write(instance, view.listed[0], 0, *("x" * 100 for _ in range(5000)))
        process = await asyncio.create_subprocess_shell(
            f"{' '.join(command(instance, 'logs', 'p'))} | head -1",
            stdout=PIPE,
            stderr=PIPE,
            env=environment(),
        )
        assert await process.communicate() == (b"one\n", b"")
