import re
import socket

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pykubelet.linux.network import HostnameError, decide_node_name, node_name


@pytest.mark.parametrize(
    ("name", "node"),
    [
        ("vm", "vm"),
        ("  Node-1.Example.COM \n", "node-1.example.com"),
        ("192.0.2.10", "192.0.2.10"),
        ("a" * 253, "a" * 253),
    ],
)
def test_decide_node_name_is_trimmed_and_lower_case(name: str, node: str) -> None:
    assert decide_node_name(name, "x") == node


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("", "is empty"),
        (" \n", "is empty"),
        ("a" * 254, "254 characters"),
        ("my_node", r"'my_node' cannot be .* such as my-node$"),
        ("-node-.local", r"such as node\.local$"),
        ("a..b", r"such as a\.b$"),
        ("node\n1", "cannot be"),
        ("üß", "--hostname-override$"),
    ],
)
def test_decide_node_name_invalid_raises_with_remedy(name: str, words: str) -> None:
    with pytest.raises(HostnameError, match=words) as caught:
        decide_node_name(name, "the machine's host name")
    assert "--hostname-override" in str(caught.value)
    assert "\n" not in str(caught.value)


@given(st.text())
def test_decide_node_name_any_text_returns_dns_name_or_raises(name: str) -> None:
    try:
        node = decide_node_name(name, "x")
    except HostnameError as err:
        suggested = re.search(r"such as (.+)$", str(err))
        if suggested and len(suggested[1]) <= 253:
            assert decide_node_name(suggested[1], "x") == suggested[1]
        return
    assert re.fullmatch(r"[a-z0-9]([-.a-z0-9]*[a-z0-9])?", node)


def test_node_name_override_precedes_hostname() -> None:
    assert node_name("Other") == "other"
    assert node_name() == socket.gethostname().strip().lower()
    with pytest.raises(HostnameError, match="--hostname-override 'a_b'"):
        node_name("a_b")
