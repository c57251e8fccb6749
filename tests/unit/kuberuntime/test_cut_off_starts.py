"""A container whose start was cut off never ran: it is started, and has not failed."""

import time

import pytest

from pykubelet.cri import runtime_pb2 as pb
from pykubelet.kuberuntime.observe import observed_container


@pytest.mark.parametrize(
    ("started_at", "reason", "message", "phase"),
    [
        (0, "StartError", "failed to create shim task: context canceled: unknown", "created"),
        (0, "StartError", "failed to create shim task: context deadline exceeded: unknown", "created"),
        (0, "StartError", "failed to start shim: start failed: : signal: killed: unknown", "created"),
        (0, "StartError", "failed to start shim: \nfailed to start shim: x\nsignal: killed", "created"),
        (0, "StartError", "signal: killed: failed to start shim: ", "exited"),
        (0, "", "", "created"),  # the runtime was killed before the process began
        (0, "StartError", 'exec: "/no": stat /no: no such file or directory: unknown', "exited"),
        (7, "Error", "context canceled", "exited"),
        (7, "Completed", "", "exited"),
    ],
)
def test_observed_container_start_interrupted_is_created_not_exited(
    started_at: int, reason: str, message: str, phase: str
) -> None:
    status = pb.ContainerStatus(
        id="c",
        state=pb.CONTAINER_EXITED,
        started_at=started_at,
        exit_code=137,
        reason=reason,
        message=message,
    )
    assert observed_container(status).phase == phase


def test_observed_container_long_message_takes_linear_time() -> None:
    """Verify that a message that repeats the pod's text does not freeze the event loop for minutes."""
    message = "failed to start shim: " * 20_000
    status = pb.ContainerStatus(state=pb.CONTAINER_EXITED, reason="StartError", message=message)
    began = time.process_time()
    assert observed_container(status).phase == "exited"
    assert time.process_time() - began < 2
