"""The request for a container."""

from __future__ import annotations

from pykubelet.api.expansion import expand_all
from pykubelet.api.pod import Container, Pod
from pykubelet.cri import runtime_pb2 as cri
from pykubelet.runtime.env import container_env
from pykubelet.runtime.facts import ContainerFacts
from pykubelet.runtime.labels import container_annotations, container_labels
from pykubelet.runtime.linux_resources import container_resources
from pykubelet.runtime.mounts import container_devices, container_mounts
from pykubelet.runtime.names import container_log_path
from pykubelet.runtime.problems import ConfigProblem, growth_is_a_problem
from pykubelet.runtime.security import check_run_as_non_root, container_security


@growth_is_a_problem()
def make_container_config(pod: Pod, container: Container, facts: ContainerFacts) -> cri.ContainerConfig:
    """Make the request; the same pod, container and facts always give the same one.

    `container` is an ordinary, init or ephemeral one of the pod. Raises ConfigProblem.
    """
    check_run_as_non_root(pod, container, facts)
    env = container_env(pod, container, facts)
    try:
        return cri.ContainerConfig(
            metadata=cri.ContainerMetadata(name=container.name, attempt=facts.attempt),
            image=cri.ImageSpec(image=facts.image_id, user_specified_image=container.image),
            command=expand_all(container.command, env),
            args=expand_all(container.args, env),
            working_dir=container.working_dir,
            envs=[
                cri.KeyValue(key=name, value=value.encode(errors="surrogateescape"))
                for name, value in env.items()
            ],
            mounts=container_mounts(pod, container, env, facts),
            devices=container_devices(container, facts),
            CDI_devices=[cri.CDIDevice(name=name) for name in facts.grants.cdi_devices],
            labels=container_labels(pod, container),
            annotations=container_annotations(pod, container, facts.attempt, facts.grants.annotations),
            log_path=container_log_path(container.name, facts.attempt),
            stdin=container.stdin,
            stdin_once=container.stdin_once,
            tty=container.tty,
            stop_signal=_stop_signal(container, facts),
            linux=cri.LinuxContainerConfig(
                resources=container_resources(pod, container, facts),
                security_context=container_security(pod, container, facts),
            ),
        )
    except UnicodeEncodeError as err:
        raise ConfigProblem(
            f"container {container.name} holds text that cannot be sent: {err.reason}"
        ) from err


def _stop_signal(container: Container, facts: ContainerFacts) -> str:
    """Give the signal's name in the protocol; one that it does not know leaves the image's."""
    wish = container.lifecycle.stop_signal if container.lifecycle is not None else None
    if wish is None or not facts.node.gates.enabled("ContainerStopSignals"):
        return "RUNTIME_DEFAULT"
    name = wish.replace("+", "PLUS").replace("-", "MINUS")
    return name if name in cri.Signal.DESCRIPTOR.values_by_name else "RUNTIME_DEFAULT"
