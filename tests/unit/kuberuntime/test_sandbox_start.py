"""Starting a sandbox: which event names which failure."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from pykubelet.cri import runtime_pb2 as pb
from pykubelet.kuberuntime.configuration.options import RuntimeNodeOptions
from pykubelet.kuberuntime.observe import Observer
from pykubelet.podconfig.pod_history import PodHistory
from pykubelet.transport.errors import CriError, Unavailable
from tests.support.containers import make_pod
from tests.unit.kuberuntime.starting import make_starter


@pytest.mark.parametrize(
    ("broken", "reason", "message"),
    [
        ("run_pod_sandbox", "FailedCreatePodSandBox", "Failed to create pod sandbox"),
        ("pod_sandbox_status", "FailedPodSandBoxStatus", "Unable to get pod sandbox status"),
    ],
)
async def test_sandbox_failed_call_has_its_own_event(
    tmp_path: Path, broken: str, reason: str, message: str
) -> None:
    made = list[str]()

    def fail(call: str) -> None:
        if call == broken:
            raise Unavailable(call, "Unavailable", "gone away")

    async def run_pod_sandbox(*_: object) -> str:
        fail("run_pod_sandbox")
        return "box"

    async def pod_sandbox_status(_: str) -> pb.PodSandboxStatusResponse:
        fail("pod_sandbox_status")
        return pb.PodSandboxStatusResponse(status=pb.PodSandboxStatus(id="box"))

    runtime = SimpleNamespace(run_pod_sandbox=run_pod_sandbox, pod_sandbox_status=pod_sandbox_status)
    cri, journal = cast(Any, SimpleNamespace(runtime=runtime)), PodHistory()
    starter = make_starter(
        cri,
        Observer(cri),
        RuntimeNodeOptions(pod_logs_dir=str(tmp_path / "logs")),
        tmp_path,
        journal,
        on_created=lambda _, *ids: made.extend(ids),
    )
    pod = make_pod(dns_policy="Default")
    with pytest.raises(CriError):
        await starter.run_sandbox(pod, pb.PodSandboxConfig())
    events = [(event.kind, event.reason, event.message) for event in journal.events(pod.uid)]
    assert events == [("Warning", reason, f"{message}: rpc error: code = Unavailable desc = gone away")]
    # A sandbox that exists is known as the pod's, or the next kubelet process would not look for it.
    assert made == (["box"] if broken == "pod_sandbox_status" else [])
