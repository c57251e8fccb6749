from types import SimpleNamespace
from typing import Any

import pytest

from pykubelet.api.pod import Container, ExecAction, HTTPGetAction, LifecycleHandler
from pykubelet.kuberuntime.kill import HookError, HookRunner
from pykubelet.transport.errors import CriError
from tests.support.containers import make_pod

POD = make_pod()
MAIN = POD.spec.containers[0]
EXEC = LifecycleHandler(exec=ExecAction(command=["save", "all"]))
GET = LifecycleHandler(http_get=HTTPGetAction(port=80))


class HookTarget:
    """The runtime and the HTTP server that hooks reach."""

    def __init__(self, *, exit_code: int = 0, failure: CriError | None = None, response: str = "") -> None:
        self.runtime = self
        self.requests: list[object] = []
        self._exit_code, self._failure, self._response = exit_code, failure, response

    async def exec_sync(self, container_id: str, command: list[str], timeout: int) -> Any:
        self.requests.append((container_id, command, timeout))
        if self._failure is not None:
            raise self._failure
        return SimpleNamespace(exit_code=self._exit_code, stdout=b"out ", stderr=b"err" + b"!" * 4096)

    async def http_get(self, action: HTTPGetAction, container: Container, address: str) -> str | None:
        self.requests.append((action, container.name, address))
        return self._response or None

    def runner(self, ip: str = "10.0.0.2") -> HookRunner:
        cri: Any = self
        return HookRunner(cri, self.http_get, lambda uid: ip if uid == POD.uid else "")


async def test_run_exec_exit_zero_succeeds() -> None:
    target = HookTarget()
    await target.runner().run(POD, MAIN, "c1", EXEC)
    assert target.requests == [("c1", ["save", "all"], 0)]


@pytest.mark.parametrize("code", [1, 2, 137])
async def test_run_exec_other_exit_code_fails(code: int) -> None:
    with pytest.raises(HookError, match=rf'exited with {code}: err!+, message: "out err!+"$') as caught:
        await HookTarget(exit_code=code).runner().run(POD, MAIN, "c1", EXEC)
    assert len(str(caught.value)) < 2500


async def test_run_exec_runtime_error_fails() -> None:
    target = HookTarget(failure=CriError("ExecSync", "Unknown", "no shim"))
    with pytest.raises(HookError, match="no shim"):
        await target.runner().run(POD, MAIN, "c1", EXEC)


async def test_run_http_get_requests_pod_address() -> None:
    target = HookTarget()
    await target.runner().run(POD, MAIN, "c1", GET)
    assert target.requests == [(GET.http_get, "main", "10.0.0.2")]


async def test_run_http_get_bad_response_fails() -> None:
    with pytest.raises(HookError, match="500"):
        await HookTarget(response="statuscode: 500").runner().run(POD, MAIN, "c1", GET)


async def test_run_http_get_without_address_fails() -> None:
    target = HookTarget()
    with pytest.raises(HookError, match="no address"):
        await target.runner(ip="").run(POD, MAIN, "c1", GET)
    assert target.requests == []


async def test_run_without_action_fails() -> None:
    with pytest.raises(HookError, match="names no action"):
        await HookTarget().runner().run(POD, MAIN, "c1", LifecycleHandler())
