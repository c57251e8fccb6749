"""The small value helpers: names of fields, CPUs, addresses, names, kernel parameters, quoting."""

import contextlib
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pykubelet.api import cpuset
from pykubelet.api.ip import parse_cidr, parse_ip
from pykubelet.api.meta import ObjectMeta, to_json, wire_name
from pykubelet.api.names import (
    dns_label_problem,
    dns_subdomain_problem,
    image_repository_problem,
    label_value_problem,
    namespace_of,
    normal_name,
    qualified_name_problem,
    sysctl_pattern_problem,
)
from pykubelet.util.text import LONGEST_SHOWN, quoted


@pytest.mark.parametrize(
    ("field", "name"),
    [
        ("kind", "kind"),
        ("api_version", "apiVersion"),
        ("cluster_dns", "clusterDNS"),
        ("pod_ips", "podIPs"),
        ("host_ip", "hostIP"),
        ("pod_cidrs", "podCIDRs"),
        ("client_ca_file", "clientCAFile"),
        ("tls_cert_file", "tlsCertFile"),
        ("server_tls_bootstrap", "serverTLSBootstrap"),
        ("make_iptables_util_chains", "makeIPTablesUtilChains"),
        ("iptables_drop_bit", "iptablesDropBit"),
        ("reserved_system_cpus", "reservedSystemCPUs"),
        ("cpu_cfs_quota", "cpuCFSQuota"),
        ("pod_pids_limit", "podPidsLimit"),
        ("set_hostname_as_fqdn", "setHostnameAsFQDN"),
        ("system_uuid", "systemUUID"),
        ("from_", "from"),
    ],
)
def test_wire_name_snake_case_to_api_field(field: str, name: str) -> None:
    assert wire_name(field) == name


@pytest.mark.parametrize(
    ("text", "cpus"),
    [
        ("", set()),
        ("0", {0}),
        ("0-3,5", {0, 1, 2, 3, 5}),
        ("5,0-1,1", {0, 1, 5}),
        ("7-7", {7}),
        ("65535", {65535}),
    ],
)
def test_cpuset_parse_valid_text_returns_cpus(text: str, cpus: set[int]) -> None:
    assert cpuset.parse(text) == cpus


@pytest.mark.parametrize(
    "text",
    [
        ",",
        "0,",
        "a",
        "-1",
        "1-",
        "3-1",
        "0-1-2",
        " 0",
        "0 ",
        "+1",
        "1.5",
        "0-99999999999",
        "65536",
        "²",
        "1\n",
    ],
)
def test_cpuset_parse_invalid_text_raises_value_error(text: str) -> None:
    with pytest.raises(ValueError, match=r"such as|largest") as caught:
        cpuset.parse(text)
    assert "\n" not in str(caught.value)


@given(st.frozensets(st.integers(0, 300)))
def test_cpuset_format_parse_roundtrip(cpus: frozenset[int]) -> None:
    assert cpuset.parse(cpuset.format(cpus)) == cpus


@given(st.text(alphabet="0123456789-, x", max_size=20))
def test_cpuset_parse_any_text_roundtrips_or_value_error(text: str) -> None:
    try:
        cpus = cpuset.parse(text)
    except ValueError:
        return
    assert cpuset.parse(cpuset.format(cpus)) == cpus


@pytest.mark.parametrize(
    ("text", "address"),
    [
        ("10.96.0.10", "10.96.0.10"),
        ("010.096.000.010", "10.96.0.10"),
        ("0.0.0.0", "0.0.0.0"),
        ("::1", "::1"),
        ("FD00::A", "fd00::a"),
        ("::ffff:10.0.0.1", "::ffff:10.0.0.1"),
        ("100.200.0.100", "100.200.0.100"),
    ],
)
def test_parse_ip_valid_text_returns_address(text: str, address: str) -> None:
    assert parse_ip(text) == parse_ip(address)
    assert "." not in address or ":" in address or str(parse_ip(text)) == address


@pytest.mark.parametrize(
    "text",
    [
        "",
        "10.0.0",
        "10.0.0.256",
        "a",
        "10.0.0.1/24",
        "fe80::1%eth0",
        "::g",
        " ::1",
        "1",
        "\u0660.0.0.0",
        "0.0.0.0\n",
    ],
)
def test_parse_ip_invalid_text_raises_value_error(text: str) -> None:
    with pytest.raises(ValueError, match="is not an IP address: write one"):
        parse_ip(text)
    with pytest.raises(ValueError, match="is not a network: write one"):
        parse_cidr(text + "/x")


def test_parse_cidr_masks_host_bits_and_rejects_invalid_text() -> None:
    assert str(parse_cidr("10.244.3.7/24")) == "10.244.3.0/24"
    assert str(parse_cidr("fd00::1/64")) == "fd00::/64"
    for text in ["10.0.0.0", "10.0.0.0/33", "10.0.0.0/255.0.0.0", "/8", "10.0.0.0/+8", "fd00::/129", "a/1"]:
        with pytest.raises(ValueError, match="is not a network"):
            parse_cidr(text)


@given(st.text())
def test_parse_ip_and_cidr_any_text_roundtrips_or_value_error(text: str) -> None:
    with contextlib.suppress(ValueError):
        assert parse_ip(str(parse_ip(text))) == parse_ip(text)
    with contextlib.suppress(ValueError):
        assert parse_cidr(str(parse_cidr(text))) == parse_cidr(text)


GOOD_NAMES = {
    dns_label_problem: ["a", "0", "a-b", "a" * 63],
    dns_subdomain_problem: ["a", "a.b", "node-1.example.com", "0.0", ("a" * 62 + ".") * 4 + "a"],
    qualified_name_problem: ["a", "A_b.c-d", "example.com/A", "a.b/c", "x" * 63, "kubernetes.io/x_Y"],
    label_value_problem: ["", "a", "A_b.c-9", "x" * 63],
    image_repository_problem: [
        "app",
        "library/app",
        "registry.example.com/team/app",
        "localhost:5000/a__b/c-d",
        "[fd00::1]:5000/app",
        "UPPER.example.com/app",
    ],
}
BAD_NAMES = {
    dns_label_problem: ["", "A", "a.b", "-a", "a-", "a_b", "a" * 64, "a\n", "é"],
    dns_subdomain_problem: ["", ".", "a.", ".a", "a..b", "A.b", "a_b", "a-.b", "a" * 254, "a\n"],
    qualified_name_problem: [
        "",
        "/",
        "/a",
        "a/",
        "a/b/c",
        "A/b",
        "a b",
        "-a",
        "a-",
        "x" * 64,
        "a/" + "x" * 64,
        "a\n",
    ],
    label_value_problem: ["-a", "a-", "a b", "a/b", "x" * 64, "a\n", "."],
    image_repository_problem: [
        "",
        "App",
        "a:tag",
        "a@sha256:" + "0" * 64,
        "/a",
        "a/",
        "a//b",
        " a",
        "a_",
        "a" * 256,
    ],
}


def test_name_validation_accepts_valid_and_rejects_invalid_names() -> None:
    for problem, names in GOOD_NAMES.items():
        assert {name: problem(name) for name in names} == dict.fromkeys(names)
    for problem, names in BAD_NAMES.items():
        assert [name for name in names if problem(name) is None] == []


@pytest.mark.parametrize(
    ("pattern", "namespace"),
    [
        ("kernel.sem", "IPC"),
        ("kernel.shm*", "IPC"),
        ("kernel.msgmax", "IPC"),
        ("fs.mqueue.*", "IPC"),
        ("net.*", "Net"),
        ("net.ipv4.tcp_syncookies", "Net"),
        ("kernel/msg*", "IPC"),
        ("net/ipv4/conf/a.b/x", "Net"),
        ("foo", None),
        ("foo*", None),
        ("*", None),
        ("kernel.*", None),
        ("kernel.semaphore", None),
        ("vm.swappiness", None),
    ],
)
def test_namespace_of_sysctl_pattern_only_namespaced_accepted(pattern: str, namespace: str | None) -> None:
    assert namespace_of(pattern) == namespace
    assert (sysctl_pattern_problem(pattern) is None) == (namespace is not None)


@pytest.mark.parametrize(
    "pattern",
    [
        "",
        " kernel.msg*",
        "kernel.msg* ",
        "net.-",
        "net.*.foo",
        "net.*/foo",
        "net.",
        "Net.x",
        "net.a_",
        "net." + "a" * 250,
    ],
)
def test_sysctl_pattern_problem_invalid_pattern_rejected(pattern: str) -> None:
    assert sysctl_pattern_problem(pattern)


def test_sysctl_normal_name_slashes_and_dots() -> None:
    assert normal_name("net/ipv4/conf/eno2.100/rp_filter") == "net.ipv4.conf.eno2/100.rp_filter"
    assert normal_name("net.ipv4.conf.eno2/100.rp_filter") == "net.ipv4.conf.eno2/100.rp_filter"
    assert normal_name("plain") == "plain"


@given(st.text(max_size=300))
def test_quoted_any_text_is_one_short_line(text: str) -> None:
    shown = quoted(text)
    assert "\n" not in shown
    assert len(shown) <= 10 * (LONGEST_SHOWN + 1) + 2
    if len(text) <= LONGEST_SHOWN:
        assert shown == repr(text)


@given(
    st.dictionaries(
        st.text(st.characters(exclude_categories=[])), st.text(st.characters(exclude_categories=[]))
    )
)
def test_to_json_lone_surrogates_dropped(labels: dict[str, str]) -> None:
    read = json.loads(to_json(ObjectMeta(name="x", labels=labels)))
    good = {name: value for name, value in labels.items() if not _has_surrogates(name + value)}
    assert good.items() <= read.get("labels", {}).items()
    assert not any(_has_surrogates(name + value) for name, value in read.get("labels", {}).items())


def _has_surrogates(text: str) -> bool:
    return any("\ud800" <= character <= "\udfff" for character in text)
