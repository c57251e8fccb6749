"""Messages of failed lifecycle hooks: users and tools search for the upstream kubelet's text."""

from types import SimpleNamespace
from typing import Any, cast

import pytest

from pykubelet.api.pod import ExecAction, HTTPGetAction, LifecycleHandler
from pykubelet.kuberuntime.kill import OUTPUT_BYTES, HookError, HookRunner
from pykubelet.transport.errors import CriError
from tests.support.pods import make_pod

POD = make_pod()
WHO = 'Container "main" in Pod "web_default(u1)"'


def runner(
    result: Any = None, failure: CriError | None = None, problem: str | None = None, ip: str = ""
) -> HookRunner:
    """A runner whose command ends in this way, or whose request has this problem."""

    async def exec_sync(*_: object) -> Any:
        if failure is not None:
            raise failure
        return result

    async def http_get(*_: object) -> str | None:
        return problem

    cri = SimpleNamespace(runtime=SimpleNamespace(exec_sync=exec_sync))
    return HookRunner(cast(Any, cri), http_get, lambda _: ip)


def output(code: int, stdout: bytes = b"", stderr: bytes = b"") -> Any:
    return SimpleNamespace(exit_code=code, stdout=stdout, stderr=stderr)


async def message_of(subject: HookRunner, hook: LifecycleHandler) -> str:
    with pytest.raises(HookError) as caught:
        await subject.run(POD, POD.spec.containers[0], "c1", hook)
    return str(caught.value)


COMMAND = LifecycleHandler(exec=ExecAction(command=["sh", "-c", "echo no; exit 4"]))


async def test_exec_hook_non_zero_exit_message_is_upstreams() -> None:
    assert await message_of(runner(output(4, b'so "it" is\n', b"no\n")), COMMAND) == (
        f"Exec lifecycle hook ([sh -c echo no; exit 4]) for {WHO} failed - error: "
        "command 'sh -c echo no; exit 4' exited with 4: no\n, "
        r'message: "so \"it\" is\nno\n"'
    )


async def test_exec_hook_runtime_error_message_is_upstreams() -> None:
    failure = CriError("ExecSync", "Unknown", "no such binary")
    assert await message_of(runner(failure=failure), COMMAND) == (
        f"Exec lifecycle hook ([sh -c echo no; exit 4]) for {WHO} failed - error: "
        'rpc error: code = Unknown desc = no such binary, message: ""'
    )


async def test_exec_hook_large_output_bounded() -> None:
    told = await message_of(runner(output(1, b"x" * 10**6, b"y" * 10**6)), COMMAND)
    assert len(told) < 2 * OUTPUT_BYTES + 500


async def test_exec_hook_success_raises_nothing() -> None:
    await runner(output(0, b"fine")).run(POD, POD.spec.containers[0], "c1", COMMAND)


async def test_http_hook_message_is_upstreams() -> None:
    hook = LifecycleHandler(http_get=HTTPGetAction(path="/bye", port=80))
    assert await message_of(runner(problem="connection refused", ip="10.0.0.2"), hook) == (
        f"HTTP lifecycle hook (/bye) for {WHO} failed - error: connection refused"
    )
    assert (await message_of(runner(), hook)).startswith(
        f"HTTP lifecycle hook (/bye) for {WHO} failed - error: failed to find networking container"
    )
