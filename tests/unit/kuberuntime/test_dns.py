from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pykubelet.api.pod import DNSOption, PodDNSConfig
from pykubelet.cri import runtime_pb2 as pb
from pykubelet.kuberuntime.configuration.dns import PodDNS, check_resolv_conf, parse_resolv_conf, pod_dns
from pykubelet.kuberuntime.configuration.options import RuntimeNodeOptions
from pykubelet.kuberuntime.errors import ContainerConfigError
from pykubelet.kuberuntime.observe import Observer
from pykubelet.podconfig.pod_history import PodHistory
from pykubelet.podconfig.static_pods import SOURCE_ANNOTATION
from tests.support.containers import make_pod
from tests.unit.kuberuntime.starting import make_starter

HOST = "nameserver 192.0.2.1\nsearch example.com\noptions timeout:1 rotate\n"
CLUSTER = RuntimeNodeOptions(
    cluster_dns=("10.96.0.10",), cluster_domain="cluster.local", host_ips=("192.0.2.2",)
)
CLUSTER_SEARCHES = ("shop.svc.cluster.local", "svc.cluster.local", "cluster.local")
FROM_HOST = PodDNS(("192.0.2.1",), ("example.com",), ("timeout:1", "rotate"))
FROM_CLUSTER = PodDNS(("10.96.0.10",), (*CLUSTER_SEARCHES, "example.com"), ("ndots:5",))


@pytest.mark.parametrize(
    ("policy", "host_network", "wanted"),
    [
        ("ClusterFirst", False, FROM_CLUSTER),
        ("ClusterFirst", True, FROM_HOST),
        ("ClusterFirstWithHostNet", True, FROM_CLUSTER),
        ("ClusterFirstWithHostNet", False, FROM_CLUSTER),
        ("Default", False, FROM_HOST),
        ("None", False, PodDNS()),
        ("Nonsense", False, FROM_CLUSTER),
    ],
)
def test_pod_dns_policy_returns_servers_and_searches(policy: str, host_network: bool, wanted: PodDNS) -> None:
    assert pod_dns(make_pod(dns_policy=policy, host_network=host_network), CLUSTER, HOST) == wanted


def test_pod_dns_no_cluster_dns_falls_back_to_host_with_warning() -> None:
    dns = pod_dns(make_pod(), RuntimeNodeOptions(), HOST)
    assert (dns.servers, dns.searches) == (FROM_HOST.servers, FROM_HOST.searches)
    (warning,) = dns.warnings
    assert warning.reason == "MissingClusterDNS"
    assert warning.node_message == (
        'kubelet does not have ClusterDNS IP configured and cannot create Pod using "ClusterFirst" policy. '
        'Falling back to "Default" policy.'
    )
    assert warning.message.startswith('pod: "web_shop(u-1)". kubelet does not have ClusterDNS IP configured')


def test_pod_dns_no_cluster_domain_uses_host_searches() -> None:
    dns = pod_dns(make_pod(), RuntimeNodeOptions(cluster_dns=("10.96.0.10",)), HOST)
    assert dns == PodDNS(("10.96.0.10",), ("example.com",), ("ndots:5",))


@pytest.mark.parametrize(
    ("host_ips", "servers"),
    [((), ("127.0.0.1",)), (("192.0.2.2", "2001:db8::2"), ("127.0.0.1", "::1")), (("::1",), ("::1",))],
)
def test_pod_dns_resolv_conf_disabled_uses_loopback(
    host_ips: tuple[str, ...], servers: tuple[str, ...]
) -> None:
    dns = pod_dns(make_pod(dns_policy="Default"), RuntimeNodeOptions(host_ips=host_ips), None)
    assert dns == PodDNS(servers, (".",))
    cluster = pod_dns(make_pod(), CLUSTER, None)
    assert cluster == PodDNS(("10.96.0.10",), CLUSTER_SEARCHES, ("ndots:5",))


def test_pod_dns_dns_config_extends_policy() -> None:
    wish = PodDNSConfig(
        nameservers=["1.1.1.1", "10.96.0.10"],
        searches=["own.example", "cluster.local"],
        options=[DNSOption(name="ndots", value="2"), DNSOption(name="edns0")],
    )
    dns = pod_dns(make_pod(dns_config=wish), CLUSTER, "")
    assert dns == PodDNS(("10.96.0.10", "1.1.1.1"), (*CLUSTER_SEARCHES, "own.example"), ("ndots:2", "edns0"))
    alone = pod_dns(make_pod(dns_policy="None", dns_config=wish), CLUSTER, HOST)
    assert alone == PodDNS(("1.1.1.1", "10.96.0.10"), ("own.example", "cluster.local"), ("ndots:2", "edns0"))


def test_pod_dns_more_than_three_servers_truncated_with_warning() -> None:
    dns = pod_dns(
        make_pod(dns_policy="None", dns_config=PodDNSConfig(nameservers=[f"10.0.0.{n}" for n in range(5)])),
        CLUSTER,
        "",
    )
    assert dns.servers == ("10.0.0.0", "10.0.0.1", "10.0.0.2")
    (warning,) = dns.warnings
    assert warning.reason == "DNSConfigForming"
    assert not warning.node_message
    assert warning.message == (
        "Nameserver limits were exceeded, some nameservers have been omitted, "
        "the applied nameserver line is: 10.0.0.0 10.0.0.1 10.0.0.2"
    )


@pytest.mark.parametrize(
    ("searches", "kept"),
    [
        ([f"d{n}.example" for n in range(40)], 32),
        (["x" * 250 + str(n) for n in range(9)], 8),
        (["x" * 254, "good.example"], 1),
        (["x" * 253] * 2, 1),
    ],
)
def test_pod_dns_search_limits_exceeded_truncated_with_warning(searches: list[str], kept: int) -> None:
    dns = pod_dns(make_pod(dns_policy="None", dns_config=PodDNSConfig(searches=searches)), CLUSTER, "")
    assert len(dns.searches) == kept
    if len(dns.searches) < len(set(searches)):
        (warning,) = dns.warnings
        assert warning.message.startswith(
            "Search Line limits were exceeded, some search paths have been omitted"
        )
        assert warning.message.endswith(": " + " ".join(dns.searches))


@given(
    st.lists(st.text("ab.", min_size=1, max_size=300), max_size=50),
    st.lists(st.sampled_from(["10.0.0.1", "10.0.0.2", "10.0.0.3", "::1"]), max_size=6),
)
def test_pod_dns_any_config_limits_hold_and_truncation_warns(searches: list[str], servers: list[str]) -> None:
    wish = PodDNSConfig(searches=searches, nameservers=servers)
    dns = pod_dns(make_pod(dns_policy="None", dns_config=wish), CLUSTER, "")
    assert len(dns.servers) <= 3
    assert len(dns.searches) <= 32
    assert all(len(search) <= 253 for search in dns.searches)
    assert len(" ".join(dns.searches)) <= 2048
    complete = set(searches) == set(dns.searches) and set(servers) == set(dns.servers)
    assert complete == (not dns.warnings)


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("", PodDNS()),
        ("# nameserver 1.1.1.1\n#search x\n; comment\n", PodDNS()),
        ("nameserver 1.1.1.1 # one\n\tnameserver\t2.2.2.2\r\n", PodDNS(("1.1.1.1", "2.2.2.2"))),
        ("search a.\nsearch b. . c\n", PodDNS(searches=("b", "c"))),
        ("search a\nsearch\n", PodDNS()),
        ("options ndots:1 rotate\noptions ndots:3\n", PodDNS(options=("ndots:3", "rotate"))),
        ("nameserverx 1.1.1.1\ndomain x\n", PodDNS()),
    ],
)
def test_parse_resolv_conf_returns_servers_searches_and_options(text: str, wanted: PodDNS) -> None:
    assert parse_resolv_conf(text) == wanted


def test_pod_dns_nameserver_line_without_address_raises() -> None:
    with pytest.raises(ContainerConfigError, match="nameserver"):
        pod_dns(make_pod(), CLUSTER, "nameserver\n")


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("search " + " ".join(f"d{n}" for n in range(30)), "more than 29 domains"),
        ("search " + "x" * 254, "more than allowed 253 chars"),
        ("search " + " ".join("x" * 250 for _ in range(9)), "more than allowed 2048 chars"),
    ],
)
def test_check_resolv_conf_limit_exceeded_returns_message(text: str, part: str, tmp_path: Path) -> None:
    file = tmp_path / "resolv.conf"
    file.write_text(text)
    message = check_resolv_conf(file, "cluster.local")
    assert part in message
    assert str(file) in message
    file.write_text(HOST)
    assert check_resolv_conf(file, "cluster.local") == ""


def test_check_resolv_conf_unreadable_file_returns_cause(tmp_path: Path) -> None:
    file = tmp_path / "resolv.conf"
    assert check_resolv_conf(file, "") == f"open {file}: no such file or directory"
    file.write_text("nameserver\n")
    assert "nameserver" in check_resolv_conf(file, "")


class SandboxRuntime:
    """A CRI runtime service that runs every sandbox."""

    async def run_pod_sandbox(self, config: pb.PodSandboxConfig, handler: str) -> str:
        return "sandbox"

    async def pod_sandbox_status(self, sandbox_id: str, verbose: bool = False) -> pb.PodSandboxStatusResponse:
        return pb.PodSandboxStatusResponse(status=pb.PodSandboxStatus(id=sandbox_id))


@pytest.mark.parametrize(("static", "expected"), [(False, 1), (True, 0)])
async def test_sandbox_without_cluster_dns_records_event_on_pod_and_node(
    tmp_path: Path, static: bool, expected: int
) -> None:
    cri, journal = cast(Any, SimpleNamespace(runtime=SandboxRuntime())), PodHistory()
    on_node: list[tuple[str, str, str]] = []
    starter = make_starter(
        cri,
        Observer(cri),
        RuntimeNodeOptions(pod_logs_dir=str(tmp_path)),
        tmp_path,
        journal,
        resolv_conf=HOST,
        node_event=lambda kind, reason, message: on_node.append((kind, reason, message)),
    )
    pod = make_pod()
    pod.spec.dns_policy = "ClusterFirst"
    pod.metadata.annotations[SOURCE_ANNOTATION] = "file" if static else "api"
    await starter.run_sandbox(pod, pb.PodSandboxConfig())
    assert [(kind, reason) for kind, reason, _ in on_node] == [("Warning", "MissingClusterDNS")] * expected
    assert [event.reason for event in journal.events(pod.uid)] == ["MissingClusterDNS"] * expected
    assert all("pod:" not in message for _, _, message in on_node)


def test_pod_history_event_not_recorded_reaches_listeners_only() -> None:
    journal, heard = PodHistory(), []
    journal.add_listener(lambda pod, event: heard.append((pod.uid, event.reason)))
    pod = make_pod()
    journal.event(pod, "Warning", "FailedValidation", "duplicate", keep=False)
    assert heard == [(pod.uid, "FailedValidation")]
    assert journal.events(pod.uid) == []
