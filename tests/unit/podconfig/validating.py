"""What the tests of validation share."""

from typing import Any

from pykubelet.api.pod import Pod
from pykubelet.podconfig.validate import validate_pod
from tests.unit.podconfig.making import static


def problems(pod: Pod) -> list[str]:
    return [problem.path for problem in validate_pod(pod)]


def of_spec(**spec: Any) -> list[str]:
    return problems(static(**spec))


def of_container(**fields: Any) -> list[str]:
    return of_spec(
        containers=[{"name": "main", "image": "busybox", **fields}],
        volumes=[{"name": "v", "emptyDir": {}}, {"name": "h", "hostPath": {"path": "/srv"}}],
    )
