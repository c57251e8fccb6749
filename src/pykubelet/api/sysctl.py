"""Kernel parameters that belong to a namespace, and so to one pod instead of the whole machine."""

import re

_PATTERN = re.compile(
    r"(?:[a-z0-9](?:[-_a-z0-9]*[a-z0-9])?[./])*(?:[a-z0-9][-_a-z0-9]*)?[a-z0-9*]",
    re.ASCII,
)
_LONGEST = 253
_IPC = ("kernel.sem", "kernel.shm", "kernel.msg", "fs.mqueue.")
_NET = ("net.",)


def normal_name(name: str) -> str:
    """Give a parameter's name with dots as separators, however it was written (`net/ipv4/x`)."""
    separator = re.search(r"[./]", name)
    if separator is None or separator[0] == ".":
        return name
    return name.translate(str.maketrans("./", "/."))


def namespace_of(name: str) -> str | None:
    """Give the namespace of a parameter, or of a pattern that ends with `*`: `IPC`, `Net` or None."""
    stem = normal_name(name).removesuffix("*")
    if stem.startswith(_IPC) and (stem == "kernel.sem" or not stem.startswith("kernel.sem")):
        return "IPC"
    return "Net" if stem.startswith(_NET) else None


def sysctl_pattern_problem(pattern: str) -> str | None:
    """Say what is wrong with a pattern of parameters that pods may set."""
    if len(pattern) > _LONGEST or not _PATTERN.fullmatch(pattern):
        return "must be the name of a kernel parameter, or the beginning of one and '*', such as kernel.msg*"
    if namespace_of(pattern) is None:
        return "must be of a pod's namespaces: kernel.sem, kernel.shm*, kernel.msg*, fs.mqueue.* or net.*"
    return None
