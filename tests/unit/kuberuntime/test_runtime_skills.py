"""Which runtimes know devices by their CDI names."""

import pytest

from pykubelet.kuberuntime.options import supports_cdi


@pytest.mark.parametrize(
    ("name", "version", "knows"),
    [
        ("containerd", "1.6.20~ds1", False),
        ("containerd", "v1.7.0", True),
        ("containerd", "2.1.4", True),
        ("containerd", "unreadable", True),
        ("somebody's", "0.1", True),
    ],
)
def test_supports_cdi_runtime_version_returns_support(name: str, version: str, knows: bool) -> None:
    assert supports_cdi(name, version) is knows
