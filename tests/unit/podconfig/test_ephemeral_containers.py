"""Rules of ephemeral containers that are added to running static pods."""

from typing import Any

import pytest

from pykubelet.api.meta import from_document
from pykubelet.api.pod import Container
from pykubelet.podconfig.ephemeral_containers import (
    MAX_EPHEMERAL_CONTAINERS,
    EphemeralContainerRejected,
    completed_ephemeral_container,
)
from tests.support.pod_view import pod_of


def added(**fields: Any) -> Container:
    spec = {
        "volumes": [{"name": "v", "emptyDir": {}}],
        "initContainers": [{"name": "init", "image": "i"}],
        "ephemeralContainers": [{"name": "old", "image": "i"}],
    }
    document = {"name": "d", "image": "busybox"} | fields
    return completed_ephemeral_container(pod_of("p", "u", spec=spec), from_document(Container, document))


def test_completed_ephemeral_container_valid_has_defaults() -> None:
    found = added(targetContainerName="init", stdin=True, volumeMounts=[{"name": "v", "mountPath": "/v"}])
    assert (found.image_pull_policy, found.termination_message_path) == ("Always", "/dev/termination-log")


@pytest.mark.parametrize(
    ("fields", "problem"),
    [
        ({"name": "main"}, "'main' is the name of another container"),
        ({"name": "init"}, "'init' is the name of another container"),
        ({"name": "old"}, "'old' is the name of another container"),
        ({"name": "A"}, "ephemeralContainer.name"),
        ({"image": ""}, "ephemeralContainer.image"),
        ({"targetContainerName": "old"}, "the pod has no container 'old'"),
        ({"ports": [{"containerPort": 80}]}, "ephemeralContainer.ports: must not be set"),
        ({"readinessProbe": {"exec": {"command": ["x"]}}}, "readinessProbe: must not be set"),
        ({"lifecycle": {"preStop": {"exec": {"command": ["x"]}}}}, "lifecycle: must not be set"),
        ({"resources": {"limits": {"cpu": "1"}}}, "resources: must not be set"),
        ({"restartPolicy": "Always"}, "restartPolicy: must not be set"),
        ({"volumeMounts": [{"name": "v", "mountPath": "/v", "subPath": "s"}]}, "must not have a subPath"),
        ({"volumeMounts": [{"name": "none", "mountPath": "/v"}]}, "volumeMounts[0]"),
    ],
)
def test_completed_ephemeral_container_invalid_is_rejected(fields: dict[str, Any], problem: str) -> None:
    with pytest.raises(EphemeralContainerRejected) as caught:
        added(**fields)
    assert problem in str(caught.value)


def test_completed_ephemeral_container_number_is_bounded() -> None:
    many = [{"name": f"d{number}", "image": "i"} for number in range(MAX_EPHEMERAL_CONTAINERS)]
    pod = pod_of("p", "u", spec={"ephemeralContainers": many})
    with pytest.raises(EphemeralContainerRejected, match="which is the maximum"):
        completed_ephemeral_container(pod, Container(name="d", image="i"))
