"""Validation of names (DNS, label keys and values, images), and namespaced sysctls.

Each `…_problem` function returns None for a valid name, otherwise a sentence that states what is allowed,
which the caller appends to the path of the field.
"""

import re

_LABEL = r"[a-z0-9](?:[-a-z0-9]*[a-z0-9])?"
_DNS_LABEL = re.compile(_LABEL)
_DNS_SUBDOMAIN = re.compile(rf"{_LABEL}(?:\.{_LABEL})*")
_QUALIFIED = re.compile(r"(?:[A-Za-z0-9][-A-Za-z0-9_.]*)?[A-Za-z0-9]")
_COMPONENT = r"[a-z0-9]+(?:(?:[._]|__|-+)[a-z0-9]+)*"
_HOST = r"[a-zA-Z0-9](?:[a-zA-Z0-9-]*[a-zA-Z0-9])?"
_REPOSITORY = re.compile(
    rf"(?:(?:{_HOST}(?:\.{_HOST})*|\[[a-fA-F0-9:]+\])(?::[0-9]+)?/)?{_COMPONENT}(?:/{_COMPONENT})*"
)
_LONGEST_REPOSITORY = 255


def dns_label_problem(name: str) -> str | None:
    """Return the problem with a DNS label, such as a namespace or a container name, or None."""
    if len(name) <= 63 and _DNS_LABEL.fullmatch(name):
        return None
    return (
        "must be 1 to 63 lower case letters, digits or '-', and begin and end with a letter or digit, "
        "such as my-name"
    )


def dns_subdomain_problem(name: str) -> str | None:
    """Return the problem with a DNS subdomain, such as a node or pod name, or None."""
    if len(name) <= 253 and _DNS_SUBDOMAIN.fullmatch(name):
        return None
    return (
        "must be at most 253 lower case letters, digits, '-' or '.', each part beginning and ending "
        "with a letter or digit, such as node-1.example.com"
    )


def qualified_name_problem(name: str) -> str | None:
    """Return the problem with the key of a label, an annotation or a taint, or a resource name, or None."""
    prefix, slash, rest = name.rpartition("/")
    if slash and dns_subdomain_problem(prefix):
        return "must have a DNS name before the '/', such as example.com/my-key"
    if len(rest) <= 63 and _QUALIFIED.fullmatch(rest):
        return None
    return (
        "must be 1 to 63 letters, digits, '-', '_' or '.', beginning and ending with a letter or digit, "
        "after an optional DNS name and '/', such as example.com/my-key"
    )


def is_extended_resource(name: str) -> bool:
    """Return whether a resource is an extended resource, such as `example.com/dongle`."""
    own = "/" not in name or "kubernetes.io/" in name or name.startswith("requests.")
    return not own and qualified_name_problem(f"requests.{name}") is None


def label_value_problem(value: str) -> str | None:
    """Return the problem with the value of a label or a taint, or None; it may be empty."""
    if not value or (len(value) <= 63 and _QUALIFIED.fullmatch(value)):
        return None
    return (
        "must be empty, or at most 63 letters, digits, '-', '_' or '.', beginning and ending "
        "with a letter or digit, such as my-value"
    )


def image_repository_problem(name: str) -> str | None:
    """Return the problem with an image name without tag and digest, or None."""
    if len(name) <= _LONGEST_REPOSITORY and _REPOSITORY.fullmatch(name):
        return None
    return "must be the name of an image without tag and digest, such as registry.example.com/team/app"


_PATTERN = re.compile(
    r"(?:[a-z0-9](?:[-_a-z0-9]*[a-z0-9])?[./])*(?:[a-z0-9][-_a-z0-9]*)?[a-z0-9*]",
    re.ASCII,
)
_LONGEST = 253
_IPC = ("kernel.sem", "kernel.shm", "kernel.msg", "fs.mqueue.")
_NET = ("net.",)


def normal_name(name: str) -> str:
    """Return a sysctl name with dots as separators, for either spelling (`net/ipv4/x`)."""
    separator = re.search(r"[./]", name)
    if separator is None or separator[0] == ".":
        return name
    return name.translate(str.maketrans("./", "/."))


def namespace_of(name: str) -> str | None:
    """Return the namespace of a sysctl, or of a pattern that ends with `*`: `IPC`, `Net` or None."""
    stem = normal_name(name).removesuffix("*")
    if stem.startswith(_IPC) and (stem == "kernel.sem" or not stem.startswith("kernel.sem")):
        return "IPC"
    return "Net" if stem.startswith(_NET) else None


def sysctl_pattern_problem(pattern: str) -> str | None:
    """Return the problem with a pattern of sysctls that pods may set, or None."""
    if len(pattern) > _LONGEST or not _PATTERN.fullmatch(pattern):
        return "must be the name of a kernel parameter, or the beginning of one and '*', such as kernel.msg*"
    if namespace_of(pattern) is None:
        return "must be of a pod's namespaces: kernel.sem, kernel.shm*, kernel.msg*, fs.mqueue.* or net.*"
    return None
