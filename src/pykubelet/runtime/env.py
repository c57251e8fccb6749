"""A container's environment: from all its sources, in the order in which they were written.

Later sources win: what device plugins give, then `envFrom`, then `env`; the variables of services
fill what is left. A variable may refer to those above it and to services as `$(NAME)`. Whatever
cannot be resolved stops the container before it exists, with a sentence that says what is missing.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache
from typing import Literal

from pykubelet.api.downward import field_value, resource_value
from pykubelet.api.expansion import checked_size, expand
from pykubelet.api.ip import by_family
from pykubelet.api.pod import (
    Container,
    EnvFromSource,
    EnvVarSource,
    FileKeySelector,
    KeySelector,
    NamedRef,
    Pod,
)
from pykubelet.pods.static import is_static_pod
from pykubelet.runtime.facts import ContainerFacts
from pykubelet.runtime.problems import ConfigProblem, MissingSource, ServicesUnknown, growth_is_a_problem

_Kind = Literal["ConfigMap", "Secret"]
_Data = Mapping[str, str] | Mapping[str, bytes]


@growth_is_a_problem()
def container_env(pod: Pod, container: Container, facts: ContainerFacts) -> dict[str, str]:
    """Give a container's variables; raises ConfigProblem.

    Bytes that are no text (of secrets) are in the values as `surrogateescape` writes them.
    """
    if facts.service_env is None and not is_static_pod(pod):
        raise ServicesUnknown("services have not yet been read at least once, cannot construct envvars")
    services = facts.service_env or {}
    sources = _Sources(pod, facts)
    own: dict[str, str] = {}
    size = 0
    for bulk in container.env_from:
        own |= {bulk.prefix + key: value for key, value in sources.all_of(bulk).items()}
    for variable in container.env:
        value: str | None = variable.value
        if value:
            value = expand(value, own, services)
        elif variable.value_from is not None:
            value = sources.value(variable.value_from, container)
        if value is not None:
            own[variable.name] = value
            # At each step, because a few lines that refer to a long value could fill the memory.
            size = checked_size(size + len(value))
    env = {**facts.grants.env, **own}
    env |= {name: value for name, value in services.items() if name not in env}
    return env


class _Sources:
    """Where values come from, each configMap and secret asked for once."""

    def __init__(self, pod: Pod, facts: ContainerFacts) -> None:
        self._pod = pod
        self._facts = facts
        self._objects: dict[_Kind, Callable[[str], _Data]] = {
            "ConfigMap": cache(facts.config_map),
            "Secret": cache(facts.secret),
        }

    def all_of(self, source: EnvFromSource) -> dict[str, str]:
        """Give all values of a configMap or secret."""
        if source.config_map_ref is not None:
            return self._bulk("ConfigMap", source.config_map_ref)
        if source.secret_ref is not None:
            return self._bulk("Secret", source.secret_ref)
        return {}

    def value(self, source: EnvVarSource, container: Container) -> str | None:
        """Give a variable's value; None when it is optional and there is none."""
        if source.field_ref is not None or source.resource_field_ref is not None:
            return self._own_value(source, container)
        if source.config_map_key_ref is not None:
            return self._one_of("ConfigMap", source.config_map_key_ref)
        if source.secret_key_ref is not None:
            return self._one_of("Secret", source.secret_key_ref)
        if source.file_key_ref is not None and self._facts.node.gates.enabled("EnvFiles"):
            return self._in_file(source.file_key_ref)
        return ""

    def _own_value(self, source: EnvVarSource, container: Container) -> str:
        node = self._facts.node
        try:
            if source.field_ref is not None:
                # In the host's network, the host's addresses are the pod's; the runtime tells none.
                ips = by_family(self._facts.pod_ips, next(iter(node.host_ips), ""))
                own = node.host_ips if self._pod.spec.host_network else ips
                return field_value(source.field_ref, self._pod, pod_ips=own, host_ips=node.host_ips)
            assert source.resource_field_ref is not None
            return resource_value(
                source.resource_field_ref, self._pod, container, node.allocatable, pod_level=node.pod_level
            )
        except ValueError as err:
            raise ConfigProblem(str(err)) from err

    def _bulk(self, kind: _Kind, ref: NamedRef) -> dict[str, str]:
        data = self._data(kind, ref.name, ref.optional)
        # Sorted, because the order of keys in an API object means nothing and may change.
        return {key: _text(data[key]) for key in sorted(data)}

    def _one_of(self, kind: _Kind, ref: KeySelector) -> str | None:
        data = self._data(kind, ref.name, ref.optional)
        if ref.key in data:
            return _text(data[ref.key])
        if ref.optional:
            return None
        raise ConfigProblem(
            f"couldn't find key {ref.key} in {kind} {self._pod.metadata.namespace}/{ref.name}"
        )

    def _data(self, kind: _Kind, name: str, optional: bool | None) -> _Data:
        try:
            return self._objects[kind](name)
        except MissingSource:
            if optional:
                return {}
            raise

    def _in_file(self, ref: FileKeySelector) -> str | None:
        if ref.volume_name not in self._facts.volumes:
            raise ConfigProblem(f'cannot find the volume "{ref.volume_name}" referenced by FileKeyRef')
        try:
            value = self._facts.env_file(ref.volume_name, ref.path, ref.key)
        except (OSError, ValueError) as err:
            raise ConfigProblem(f"couldn't parse env file: {err}") from err
        if value:
            return value
        if ref.optional:
            return None
        raise ConfigProblem(f'environment variable key "{ref.key}" not found in file "{ref.path}"')


def _text(value: str | bytes) -> str:
    """Keep bytes that are no text as they are, through to the runtime."""
    return value if isinstance(value, str) else value.decode(errors="surrogateescape")
