import asyncio
import contextlib
import gc
import resource
import socket
import warnings
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import grpc
import pytest
import uvloop
from hypothesis import given
from hypothesis import strategies as st

from pykubelet.api.pod import Container, EnvVar, ExecAction, GRPCAction, Probe, TCPSocketAction
from pykubelet.probes.grpc_probe import decode_status, encode_request, grpc_check
from pykubelet.probes.network_probes import tcp_check
from pykubelet.probes.runner import (
    BUSY_SECONDS,
    Checker,
    ExecSlots,
    PreparedProbe,
    exec_check,
    expand,
)
from pykubelet.probes.types import BadTarget, ProbeResult, Target
from pykubelet.transport.errors import CommandTimedOut, CriError
from tests.support.probes import exec_probe, run_probe, target

# TCP


async def test_tcp_check_open_port_succeeds_and_closed_port_fails() -> None:
    server = await asyncio.start_server(lambda _, writer: writer.close(), "127.0.0.1", 0)
    async with server:
        port = server.sockets[0].getsockname()[1]
        assert await tcp_check(TCPSocketAction(port=port), target(), 20) == ProbeResult("success")
        assert await tcp_check(
            TCPSocketAction(port=port, host="localhost"), target(ip=""), 20
        ) == ProbeResult("success")
    refused = await tcp_check(TCPSocketAction(port=port), target(), 20)
    assert refused == ProbeResult("failure", f"dial tcp 127.0.0.1:{port}: connect: connection refused")


async def test_tcp_probe_open_and_closed_port_equal_tcp_check() -> None:
    server = await asyncio.start_server(lambda _, writer: writer.close(), "127.0.0.1", 0)
    async with server:
        port = server.sockets[0].getsockname()[1]
        probe = Probe(tcp_socket=TCPSocketAction(port=port), timeout_seconds=20)
        assert await run_probe(probe, target()) == ProbeResult("success")
        named = Probe(tcp_socket=TCPSocketAction(port=port, host="localhost"), timeout_seconds=20)
        assert await run_probe(named, target(ip="")) == ProbeResult("success")
    refused = await run_probe(probe, target())
    assert refused == ProbeResult("failure", f"dial tcp 127.0.0.1:{port}: connect: connection refused")
    unknown = await run_probe(Probe(tcp_socket=TCPSocketAction(port="nope")), target())
    assert unknown == ProbeResult("unknown", "port nope not found", errored=True)


async def test_tcp_check_unresolvable_host_fails() -> None:
    unknown = await tcp_check(TCPSocketAction(port=80, host="no-such-host.invalid"), target(), 45)
    assert unknown.output.startswith("dial tcp: lookup no-such-host.invalid")
    absurd = await tcp_check(TCPSocketAction(port=80, host="a" * 70 + ".example"), target(), 45)
    assert absurd.result == "failure"
    with pytest.raises(BadTarget, match="no IP address"):
        await tcp_check(TCPSocketAction(port=80), target(ip=""), 1)


async def test_tcp_check_connect_hangs_times_out() -> None:
    with socket.socket() as full:
        full.bind(("127.0.0.1", 0))
        full.listen(0)
        port = full.getsockname()[1]
        waiting = [socket.socket() for _ in range(3)]
        try:
            for client in waiting:
                client.setblocking(False)
                client.connect_ex(("127.0.0.1", port))
            outcome = await tcp_check(TCPSocketAction(port=port), target(), 0.2)
            probe = Probe(tcp_socket=TCPSocketAction(port=port), timeout_seconds=1)
            assert await run_probe(probe, target()) == outcome
        finally:
            for client in waiting:
                client.close()
    assert outcome == ProbeResult("failure", f"dial tcp 127.0.0.1:{port}: i/o timeout")


# gRPC


@asynccontextmanager
async def health_server(statuses: dict[str, Any], seen: list[Any] | None = None) -> AsyncIterator[int]:
    async def check(request: bytes, context: Any) -> bytes:
        if seen is not None:
            seen.append(dict(context.invocation_metadata()))
        name = request[2:].decode()
        if name == "slow":
            await asyncio.sleep(60)
        if name not in statuses:
            await context.abort(grpc.StatusCode.NOT_FOUND, "unknown service")
        answer: bytes = statuses[name]
        return answer

    server = grpc.aio.server()
    methods = {"Check": grpc.unary_unary_rpc_method_handler(check)} if statuses else {}
    handler = grpc.method_handlers_generic_handler("grpc.health.v1.Health", methods)
    server.add_generic_rpc_handlers((handler,))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        yield port
    finally:
        await server.stop(None)


async def ask_grpc(port: int, service: str | None = None, timeout: float = 30) -> ProbeResult:
    return await grpc_check(GRPCAction(port=port, service=service), target(), timeout, "kube-probe/1.36")


async def test_grpc_check_health_status_sets_result() -> None:
    seen: list[Any] = []
    statuses = {"": b"\x08\x01", "sick": b"\x08\x02", "odd": b"\x08\x63", "none": b"", "junk": b"\x08"}
    async with health_server(statuses, seen) as port:
        assert await ask_grpc(port) == ProbeResult("success", "service healthy")
        sick = await ask_grpc(port, "sick")
        assert sick == ProbeResult("failure", 'service unhealthy (responded with "NOT_SERVING")')
        assert '"99"' in (await ask_grpc(port, "odd")).output
        assert '"UNKNOWN"' in (await ask_grpc(port, "none")).output
        assert "cut short" in (await ask_grpc(port, "junk")).output
        missing = await ask_grpc(port, "missing")
        assert missing == ProbeResult(
            "failure",
            "error: health rpc probe failed: rpc error: code = NotFound desc = unknown service",
        )
        slow = await ask_grpc(port, "slow", 1.5)
        assert slow == ProbeResult("failure", "timeout: health rpc did not complete within 1.5s")
    assert seen[0]["user-agent"] == "kube-probe/1.36"


async def test_grpc_check_health_not_implemented_or_no_server_fails() -> None:
    async with health_server({}) as port:
        outcome = await ask_grpc(port)
        assert outcome.output.startswith("error: this server does not implement the grpc health protocol")
    outcome = await ask_grpc(port)
    assert outcome.output.startswith(f'error: failed to connect service at "127.0.0.1:{port}": ')
    silent = await asyncio.start_server(lambda *_: None, "127.0.0.1", 0)
    async with silent:
        port = silent.sockets[0].getsockname()[1]
        outcome = await ask_grpc(port, timeout=0.3)
    assert outcome.result == "failure"
    assert "within 0.3s" in outcome.output


def test_grpc_check_on_uvloop_same_results() -> None:
    async def all_of_it() -> None:
        async with health_server({"": b"\x08\x01"}) as port:
            assert (await ask_grpc(port)).passed
        assert not (await ask_grpc(port)).passed

    uvloop.run(all_of_it())


@given(st.text(max_size=300))
def test_encode_request_any_service_is_decodable(service: str) -> None:
    # A request has the shape of an answer with a text in field 1; field 1 as a number is the status.
    message = encode_request(service)
    assert decode_status(message) == 0
    assert decode_status(message + b"\x08\x01") == 1
    assert message.endswith(service.encode())


@given(st.binary(max_size=40))
def test_decode_status_any_bytes_raise_only_value_error(message: bytes) -> None:
    with contextlib.suppress(ValueError):
        assert decode_status(message) >= 0


# exec


async def run_exec(
    answer: Any, env: tuple[EnvVar, ...] = (), command: tuple[str, ...] = ("x",)
) -> ProbeResult:
    async def exec_sync(container_id: str, words: list[str], timeout: int) -> tuple[int, bytes]:
        assert (container_id, timeout) == ("c1", 3)
        if isinstance(answer, Exception):
            raise answer
        code, output = answer
        return code, output or " ".join(words).encode()

    asked = Target(Container(name="app", env=list(env)), "c1", "")
    return await exec_check(ExecAction(command=list(command)), asked, 3, exec_sync, ExecSlots(1))


async def test_exec_check_exit_code_sets_result() -> None:
    assert await run_exec((0, b"fine")) == ProbeResult("success", "fine")
    assert await run_exec((7, b"bad\xff")) == ProbeResult("failure", "bad�")
    assert len((await run_exec((1, b"x" * 100_000))).output) == 10 * 1024
    late = await run_exec(CommandTimedOut(["x"], 3, "deadline"))
    assert late == ProbeResult("failure", 'command timed out: "x" timed out after 3s')
    broken = await run_exec(CriError("ExecSync", "NotFound", "no such container"))
    assert broken == ProbeResult(
        "unknown", "rpc error: code = NotFound desc = no such container", errored=True
    )
    filled = await run_exec((0, b""), (EnvVar(name="A", value="1"),), ("cat", "/tmp/$(A)$$(A)$(B)"))
    assert filled.output == "cat /tmp/1$(A)$(B)"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("$(A)", "1"),
        ("$(A", "$(A"),
        ("$$", "$"),
        ("$$$(A)", "$1"),
        ("$", "$"),
        ("$A)", "$A)"),
        ("$(A)$(", "1$("),
        ("x$(A)$$", "x1$"),
    ],
)
def test_expand_replaces_known_variable_references(text: str, expected: str) -> None:
    assert expand([text], [EnvVar(name="A", value="1")]) == [expected]


def test_expand_result_too_long_raises_bad_target() -> None:
    with pytest.raises(BadTarget, match="characters"):
        expand(["$(A)" * 2000], [EnvVar(name="A", value="x" * 2000)])
    before = resource.getrusage(resource.RUSAGE_SELF).ru_utime
    expand(["$(" * 500_000], [])
    assert resource.getrusage(resource.RUSAGE_SELF).ru_utime - before < 1


@pytest.mark.looptime
async def test_exec_slots_limit_concurrent_commands() -> None:
    slots, busy, most = ExecSlots(3), 0, 0

    async def command() -> None:
        nonlocal busy, most
        async with slots.slot():
            busy += 1
            most = max(most, busy)
            await asyncio.sleep(0.2)
            busy -= 1

    began = asyncio.get_running_loop().time()
    await asyncio.gather(*(command() for _ in range(30)))
    assert most == 3
    assert asyncio.get_running_loop().time() - began == pytest.approx(2.0, abs=0.01)


@pytest.mark.looptime
async def test_exec_slots_hanging_commands_do_not_block_others() -> None:
    slots = ExecSlots(2)
    async with asyncio.TaskGroup() as group:

        async def hang() -> None:
            async with slots.slot():
                await asyncio.sleep(3600)

        hanging = [group.create_task(hang()) for _ in range(6)]
        await asyncio.sleep(0)
        began = asyncio.get_running_loop().time()
        async with slots.slot():
            waited = asyncio.get_running_loop().time() - began
        assert waited == pytest.approx(3 * BUSY_SECONDS, abs=0.01)
        for task in hanging:
            task.cancel()


@pytest.mark.looptime
async def test_exec_slots_cancelled_command_releases_slot() -> None:
    slots = ExecSlots(1)
    for _ in range(5):
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.1), slots.slot():
                await asyncio.sleep(10)
    async with asyncio.timeout(0.1), slots.slot():
        await asyncio.sleep(0)


# All together


async def test_checker_errored_check_is_tried_three_times() -> None:
    answers: list[Any] = []
    asked = 0

    async def exec_sync(container_id: str, command: list[str], timeout: int) -> tuple[int, bytes]:
        nonlocal asked
        asked += 1
        answer = answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer, b"out"

    checker = Checker(exec_sync, ExecSlots(1))
    broken = CriError("ExecSync", "Unknown", "no")
    answers[:] = [broken, broken, 0]
    assert await checker.check(exec_probe("x"), target()) == ProbeResult("success", "out")
    answers[:] = [broken, broken, broken, 0]
    assert (await checker.check(exec_probe("x"), target())).errored
    asked, answers[:] = 0, [1, 0]
    assert await checker.check(exec_probe("x"), target()) == ProbeResult("failure", "out")
    assert asked == 1


async def test_checker_dispatches_by_handler_and_rejects_missing_handler() -> None:
    async def exec_sync(container_id: str, command: list[str], timeout: int) -> tuple[int, bytes]:
        return 0, b"%d" % timeout

    checker = Checker(exec_sync, ExecSlots(1))
    assert (await checker.check(exec_probe("x"), target())).output == "1"
    assert (await checker.check(exec_probe("x", timeout_seconds=7), target())).output == "7"
    for probe in (
        Probe(tcp_socket=TCPSocketAction(port=1)),
        Probe(grpc=GRPCAction(port=1)),
    ):
        outcome = await checker.check(probe, target())
        assert (outcome.result, outcome.errored) == ("failure", False)
    assert (await checker.check(Probe(tcp_socket=TCPSocketAction(port="x")), target())).errored
    assert "missing probe handler" in (await checker.check(Probe(), target())).output


async def test_probe_run_cancelled_before_its_task_starts_leaves_no_coroutine() -> None:
    """Verify that a container that ends as its probe starts causes no warning of an unawaited coroutine."""

    async def exec_sync(*_: Any) -> Any:
        raise AssertionError("the probe was cancelled")

    results: list[ProbeResult] = []
    prepared = PreparedProbe(exec_probe("true"), target(), Checker(exec_sync, ExecSlots(1)))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        prepared.start(asyncio.create_task, results.append).cancel()
        await asyncio.sleep(0)
        gc.collect()
    assert [str(one.message) for one in caught] == []
    assert results == []
