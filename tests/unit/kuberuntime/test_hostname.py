from pathlib import Path
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pykubelet.api.pod import HostAlias
from pykubelet.config.feature_gates import FeatureGates
from pykubelet.kuberuntime.configuration.config_builder import ConfigBuilder
from pykubelet.kuberuntime.configuration.mounts import (
    hosts_file,
    kernel_hostname,
    pod_hostname,
    should_mount_hosts_file,
)
from pykubelet.kuberuntime.configuration.options import RuntimeNodeOptions
from pykubelet.kuberuntime.errors import InvalidHostname
from pykubelet.kuberuntime.paths import PodDirs
from tests.support.containers import make_pod

DOMAIN = "cluster.local"


@pytest.mark.parametrize(
    ("fields", "wanted"),
    [
        ({}, ("web", "")),
        ({"hostname": "front"}, ("front", "")),
        ({"subdomain": "sub"}, ("web", "sub.shop.svc.cluster.local")),
        ({"hostname": "front", "subdomain": "sub"}, ("front", "sub.shop.svc.cluster.local")),
        ({"hostname_override": "a.b.example", "hostname": "x", "subdomain": "y"}, ("a.b.example", "")),
        ({"name": "n" * 70}, ("n" * 63, "")),
        ({"name": "n" * 60 + "-.-" + "x" * 7}, ("n" * 60, "")),
        ({"hostname_override": "n" * 62 + ".example"}, ("n" * 62, "")),
    ],
)
def test_pod_hostname_spec_fields_return_hostname_and_domain(
    fields: dict[str, str], wanted: tuple[str, str]
) -> None:
    assert pod_hostname(make_pod(**fields), DOMAIN) == wanted


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"hostname": "Not_Good"}, 'pod Hostname "Not_Good" is not a valid DNS label'),
        ({"hostname": "a.b"}, "is not a valid DNS label"),
        ({"subdomain": "-x"}, 'pod Subdomain "-x" is not a valid DNS label'),
        ({"hostname_override": ""}, "is not a valid DNS subdomain"),
        ({"name": "-" * 70}, "was invalid"),
    ],
)
def test_pod_hostname_invalid_name_raises(fields: dict[str, str], message: str) -> None:
    with pytest.raises(InvalidHostname, match=message):
        pod_hostname(make_pod(**fields), DOMAIN)


def test_pod_hostname_override_gate_disabled_ignored() -> None:
    assert pod_hostname(make_pod(hostname_override="other"), DOMAIN, override=False) == ("web", "")


def test_kernel_hostname_set_hostname_as_fqdn_returns_fqdn() -> None:
    pod = make_pod(subdomain="sub")
    assert kernel_hostname(pod, DOMAIN) == "web"
    pod.spec.set_hostname_as_fqdn = True
    assert kernel_hostname(pod, DOMAIN) == "web.sub.shop.svc.cluster.local"
    pod.spec.subdomain = ""
    assert kernel_hostname(pod, DOMAIN) == "web"


def test_kernel_hostname_fqdn_over_64_characters_raises() -> None:
    pod = make_pod(name="n" * 37, subdomain="sub", set_hostname_as_fqdn=True)
    assert len(kernel_hostname(pod, DOMAIN)) == 64
    pod.metadata.name += "n"
    with pytest.raises(InvalidHostname, match="64 characters is the max, 65 characters requested"):
        kernel_hostname(pod, DOMAIN)


@given(st.from_regex(r"[a-z0-9]([-a-z0-9.]{0,251}[a-z0-9])?", fullmatch=True))
def test_pod_hostname_any_pod_name_returns_valid_hostname(name: str) -> None:
    hostname, _ = pod_hostname(make_pod(name=name), DOMAIN)
    assert 0 < len(hostname) <= 63
    assert name.startswith(hostname)
    assert hostname[-1] not in "-."


LOCAL = """\
# Kubernetes-managed hosts file.
127.0.0.1\tlocalhost
::1\tlocalhost ip6-localhost ip6-loopback
fe00::0\tip6-localnet
fe00::0\tip6-mcastprefix
fe00::1\tip6-allnodes
fe00::2\tip6-allrouters
"""
ALIASES = [HostAlias(ip="1.2.3.4", hostnames=["a", "b"]), HostAlias(ip="fd00::4", hostnames=["c"])]


@pytest.mark.parametrize(
    ("fields", "ips", "wanted"),
    [
        ({}, ["10.0.0.1"], LOCAL + "10.0.0.1\tweb\n"),
        ({}, ["10.0.0.1", "fd00::1"], LOCAL + "10.0.0.1\tweb\nfd00::1\tweb\n"),
        ({"subdomain": "sub"}, ["10.0.0.1"], LOCAL + "10.0.0.1\tweb.sub.shop.svc.cluster.local\tweb\n"),
        (
            {"host_aliases": ALIASES},
            ["10.0.0.1"],
            LOCAL + "10.0.0.1\tweb\n\n# Entries added by HostAliases.\n1.2.3.4\ta\tb\nfd00::4\tc\n",
        ),
        (
            {"host_network": True},
            ["192.0.2.2"],
            "# Kubernetes-managed hosts file (host network).\n127.0.0.1 localhost vm\n",
        ),
        (
            {"host_network": True, "host_aliases": ALIASES[:1]},
            [],
            "# Kubernetes-managed hosts file (host network).\n127.0.0.1 localhost vm\n"
            "\n# Entries added by HostAliases.\n1.2.3.4\ta\tb\n",
        ),
    ],
)
def test_hosts_file_pod_fields_return_content(fields: dict[str, object], ips: list[str], wanted: str) -> None:
    assert hosts_file(make_pod(**fields), ips, DOMAIN, "127.0.0.1 localhost vm\n") == wanted


def test_should_mount_hosts_file_requires_ip_or_host_network() -> None:
    assert should_mount_hosts_file(make_pod(), ["10.0.0.1"])
    assert should_mount_hosts_file(make_pod(host_network=True), [])
    assert not should_mount_hosts_file(make_pod(), [])


@pytest.mark.parametrize(("enabled", "name"), [(True, "other.example.com"), (False, "web")])
def test_config_builder_hosts_file_follows_gate_hostname_override(
    tmp_path: Path, enabled: bool, name: str
) -> None:
    node = RuntimeNodeOptions(gates=FeatureGates(overrides={"HostnameOverride": enabled}))
    nothing = cast(Any, None)
    builder = ConfigBuilder(node, PodDirs(tmp_path), nothing, nothing, lambda: None)
    pod = make_pod(hostname_override="other.example.com")
    PodDirs(tmp_path).make(pod.uid)
    written = Path(builder._write_hosts_file(pod, ["10.0.0.5"])).read_text()
    assert f"10.0.0.5\t{name}\n" in written
    assert kernel_hostname(pod, "cluster.local", override=enabled) == name
