"""The node's name: `--hostname-override`, or what the machine calls itself.

Found as the reference finds it. A name that the API server would turn down is refused here
already, where there still is someone to tell.
"""

import re
import socket

from pykubelet.host import HostError

_SUBDOMAIN = re.compile(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*")
_LONGEST = 253


class HostnameError(HostError):
    """The machine's name cannot be a node's."""


def node_name(override: str = "") -> str:
    """Give this node's name; `override` is `--hostname-override`.

    Raises HostnameError when it is empty or no DNS name.
    """
    if override:
        return decide_node_name(override, "--hostname-override")
    try:
        name = socket.gethostname()
    except OSError as err:
        raise HostnameError(
            f"the host name cannot be read ({err.strerror}): give --hostname-override"
        ) from err
    return decide_node_name(name, "the machine's host name")


def decide_node_name(name: str, source: str) -> str:
    """Turn a host name into a node name; `source` says in errors where it came from."""
    node = name.strip().lower()
    if not node:
        raise HostnameError(f"{source} is empty, and a node needs a name: give one with --hostname-override")
    if len(node) > _LONGEST:
        raise HostnameError(
            f"{source} has {len(node)} characters, and a node's name at most {_LONGEST}: "
            "give a shorter one with --hostname-override"
        )
    if not _SUBDOMAIN.fullmatch(node):
        raise HostnameError(
            f"{source} {node!r} cannot be a node's name, which has only a-z, 0-9, '-' and '.', "
            f"and a letter or digit at each end: give another with --hostname-override{_suggestion(node)}"
        )
    return node


def _suggestion(name: str) -> str:
    labels = [re.sub(r"[^a-z0-9]+", "-", label).strip("-") for label in name.split(".")]
    better = ".".join(label for label in labels if label)
    return f", such as {better}" if better else ""
