"""Values of the downward API, and expansion of `$(VAR)` references.

Environment variables and downward API volumes have the same values, so both get them from here. Errors are
ValueErrors whose text is shown to the pod's author.

Commands, arguments, variables, subPathExpr and probes are expanded: `$(NAME)` becomes the variable's value,
`$$` a single `$` (so that `$$(NAME)` is the text `$(NAME)`), and a reference to an unknown name stays
unchanged. Any input is valid, but the result is bounded: values that refer to each other could otherwise grow
exponentially.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence

from pykubelet.api.meta import Resources
from pykubelet.api.names import qualified_name_problem
from pykubelet.api.pod import Container, Pod
from pykubelet.api.quantity import Quantity
from pykubelet.api.volume import ObjectFieldSelector, ResourceFieldSelector

_DEFAULTED = ("cpu", "memory", "ephemeral-storage")
_POD_LEVEL = ("cpu", "memory")
_ESCAPES = {
    "\a": r"\a",
    "\b": r"\b",
    "\f": r"\f",
    "\n": r"\n",
    "\r": r"\r",
    "\t": r"\t",
    "\v": r"\v",
    "\\": r"\\",
    '"': r"\"",
}


def field_value(
    selector: ObjectFieldSelector,
    pod: Pod,
    *,
    pod_ips: Sequence[str] = (),
    host_ips: Sequence[str] = (),
) -> str:
    """Return the text of a pod field; addresses come from the node, the preferred one first.

    Raises ValueError.
    """
    if selector.api_version not in ("", "v1"):
        raise ValueError(f"unsupported pod version: {selector.api_version}")
    path = selector.field_path
    # From the first bracket to the last, in linear time; a regular expression would backtrack.
    begin, end = path.find("['", 1), len(path) - len("']")
    if begin > 0 and begin + len("['") <= end and path.endswith("']"):
        return _member(pod, path[:begin], path[begin + len("['") : end], path)
    meta, spec = pod.metadata, pod.spec
    match path:
        case "metadata.name":
            return meta.name
        case "metadata.namespace":
            return meta.namespace
        case "metadata.uid":
            return meta.uid
        case "metadata.labels":
            return format_map(meta.labels)
        case "metadata.annotations":
            return format_map(meta.annotations)
        case "spec.nodeName" | "spec.host":
            return spec.node_name
        case "spec.serviceAccountName":
            return spec.service_account_name
        case "status.podIP":
            return pod_ips[0] if pod_ips else ""
        case "status.podIPs":
            return ",".join(pod_ips)
        case "status.hostIP" | "status.hostIPs" if not host_ips:
            raise ValueError("host IP unknown: the node has found no address of its own yet")
        case "status.hostIP":
            return host_ips[0]
        case "status.hostIPs":
            return ",".join(host_ips)
    raise ValueError(f"unsupported fieldPath: {path}")


def resource_value(
    selector: ResourceFieldSelector,
    pod: Pod,
    container: Container | None,
    allocatable: Resources,
    *,
    pod_level: bool = True,
) -> str:
    """Return a resource amount in units of the divisor, rounded up.

    A missing limit defaults to the pod-level one, then to the node's allocatable; not for an init container
    that the selector names. The selector's container name has precedence over `container`. Raises ValueError.
    """
    defaulted = True
    if selector.container_name:
        container = _container(pod, selector.container_name)
        defaulted = container in pod.spec.containers
    if container is None:
        raise ValueError(f"no container is named for the resource {selector.resource}")
    kind, _, name = selector.resource.partition(".")
    if kind not in ("limits", "requests") or not (name in _DEFAULTED or name.startswith("hugepages-")):
        raise ValueError(f"unsupported container resource : {selector.resource}")
    amounts = container.resources.limits if kind == "limits" else container.resources.requests
    amount = amounts.get(name, Quantity.from_units(0))
    if defaulted and kind == "limits" and name in _DEFAULTED and amount.nanos == 0:
        amount = _default_limit(name, pod, allocatable, pod_level)
    divisor = Quantity.parse(str(selector.divisor) or "0")
    if divisor.nanos == 0:
        divisor = Quantity.from_units(1)
    if name == "cpu":
        return str(-(-amount.milli // divisor.milli))
    return str(-(-int(amount) // int(divisor)))


def format_map(values: Mapping[str, str]) -> str:
    """Format labels or annotations, one per line, sorted, as `key="value"`."""
    return "\n".join(f"{key}={quote(values[key])}" for key in sorted(values))


def quote(text: str) -> str:
    """Quote a text with double quotes, escaping unprintable characters as Go does."""
    return f'"{"".join(map(_escaped, text))}"'


def _escaped(char: str) -> str:
    if char in _ESCAPES:
        return _ESCAPES[char]
    if char.isprintable():
        return char
    code = ord(char)
    if code < 0x80:
        return f"\\x{code:02x}"
    return f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"


def _member(pod: Pod, path: str, key: str, field_path: str) -> str:
    match path:
        case "metadata.labels":
            values, problem = pod.metadata.labels, qualified_name_problem(key)
        case "metadata.annotations":
            values, problem = pod.metadata.annotations, qualified_name_problem(key.lower())
        case _:
            raise ValueError(f"field label does not support subscript: {field_path}")
    if problem:
        raise ValueError(f"invalid key subscript in {field_path}: {problem}")
    return values.get(key, "")


def _container(pod: Pod, name: str) -> Container:
    for container in (*pod.spec.containers, *pod.spec.init_containers):
        if container.name == name:
            return container
    raise ValueError(f"container {name} not found")


def _default_limit(name: str, pod: Pod, allocatable: Resources, pod_level: bool) -> Quantity:
    available = allocatable.get(name, Quantity.from_units(0))
    if not (pod_level and name in _POD_LEVEL and pod.spec.resources is not None):
        return available
    pod_limit = pod.spec.resources.limits.get(name)
    return pod_limit if pod_limit is not None and pod_limit.nanos else available


LONGEST = 1 << 20
"""Characters that one expansion may grow by. The kernel accepts 128 KiB per string."""
LARGEST = 16 << 20
"""Characters of all arguments, or all variables, of a container: no runtime accepts a larger request."""


class ExpansionTooLongError(ValueError):
    """Raised when an expansion exceeds what a process can be passed."""


_ESCAPE_OR_REFERENCE = re.compile(r"\$(?:\$|\(([^)]*)\))")


def expand(text: str, *variables: Mapping[str, str]) -> str:
    """Replace references; the first mapping with the name has precedence.

    Raises ExpansionTooLongError.
    """

    def value(name: str) -> str:
        return next((known[name] for known in variables if name in known), f"$({name})")

    return expand_with(text, value)


def expand_all(texts: Iterable[str], variables: Mapping[str, str]) -> list[str]:
    """Replace references in a command. Raises ExpansionTooLongError, also for the total size."""
    expanded: list[str] = []
    size = 0
    for text in texts:
        expanded.append(expand(text, variables))
        size = checked_size(size + len(expanded[-1]))
    return expanded


def checked_size(size: int) -> int:
    """Return the size unchanged. Raises ExpansionTooLongError if it is too large for a request."""
    if size > LARGEST:
        raise ExpansionTooLongError(
            f"the arguments or variables have more than {LARGEST} characters together"
        )
    return size


def expand_with(text: str, value: Callable[[str], str]) -> str:
    """Replace references by the result of a function. Raises ExpansionTooLongError."""
    # No reference can end after the last ")": only escapes are left there. Searching for ")" from every
    # "$(" would take quadratic time.
    end = text.rfind(")") + 1
    growth = 0

    def replacement(match: re.Match[str]) -> str:
        nonlocal growth
        if match[1] is None:
            return "$"
        result = value(match[1])
        growth += len(result) - len(match[0])
        if growth > LONGEST:
            raise ExpansionTooLongError(f"the expansion of {text[:40]!r} has more than {LONGEST} characters")
        return result

    return _ESCAPE_OR_REFERENCE.sub(replacement, text[:end]) + text[end:].replace("$$", "$")
