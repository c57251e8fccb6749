"""Port of the page in `pykubelet up`: the default one may be taken, an explicit one may not."""

import socket

import pytest

from pykubelet.cli.node import up
from pykubelet.config.flags.kubelet_flags import KubeletFlags
from pykubelet.config.load import load
from tests.support.ports import free_port


def test_default_page_port_taken_is_a_warning(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        monkeypatch.setattr(up, "PAGE_PORT", port)
        assert up._default_page_port() == 0
    (line,) = capsys.readouterr().err.splitlines()
    assert f"port {port} is taken by" in line
    assert line.endswith("the node starts without its page; choose another port with --page-port")


def test_default_page_port_free_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(up, "PAGE_PORT", port := free_port())
    assert up._default_page_port() == port


@pytest.mark.parametrize("flag", ["--page-port", "--cadvisor-port"])
def test_explicit_page_port_taken_is_an_error(flag: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(up, "is_root", lambda: True)
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        ports = ["--port=1", "--healthz-port=0", "--read-only-port=0"]
        problem = up.start_problem(load([f"{flag}={port}", *ports]))
    assert problem is not None
    assert problem.startswith(f"port {port} of the page server is taken by")
    assert problem.endswith("give --page-port")


@pytest.mark.parametrize(
    ("address", "url"),
    [
        ("127.0.0.1", "Page: http://127.0.0.1:4194"),
        ("::1", "Page: http://[::1]:4194"),
        ("10.0.0.5", "Page: https://10.0.0.5:4194"),
    ],
)
def test_page_url_of_address(address: str, url: str) -> None:
    assert up.page_url(KubeletFlags(page_address=address), 4194) == url
    assert up.page_url(KubeletFlags(page_address=address, page_port=5), 4194) == url.replace("4194", "5")
