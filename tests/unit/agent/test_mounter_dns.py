"""resolv.conf of the root directory that `--experimental-mounter-path` mounts in."""

import pytest

from pykubelet.agent.volumes import mounter_resolv_conf
from pykubelet.kuberuntime.errors import ContainerConfigError


@pytest.mark.parametrize(
    ("host", "expected"),
    [
        ("", "nameserver 10.0.0.10\nnameserver fd00::a\n"),
        (
            "nameserver 192.0.2.1\nsearch a.example b.example\noptions ndots:2\n",
            "nameserver 10.0.0.10\nnameserver fd00::a\nsearch a.example b.example\n",
        ),
        ("nameserver 192.0.2.1\n", "nameserver 10.0.0.10\nnameserver fd00::a\nsearch\n"),
    ],
)
def test_mounter_resolv_conf_has_cluster_dns_and_host_searches(host: str, expected: str) -> None:
    assert mounter_resolv_conf(["10.0.0.10", "fd00::a"], host) == expected


def test_mounter_resolv_conf_malformed_host_file_raises() -> None:
    with pytest.raises(ContainerConfigError):
        mounter_resolv_conf([], "nameserver\n")
