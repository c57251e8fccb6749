from collections.abc import Mapping
from contextlib import suppress
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pykubelet.api.pod import (
    EnvFromSource,
    EnvVar,
    EnvVarSource,
    FileKeySelector,
    KeySelector,
    NamedRef,
    ObjectFieldSelector,
    ResourceFieldSelector,
)
from pykubelet.cm.devices.run_options import DeviceRunOptions
from pykubelet.config.feature_gates import FeatureGates
from pykubelet.kuberuntime.configuration.env import MAX_LINE_BYTES, container_env, parse_env_file
from pykubelet.kuberuntime.configuration.options import MountedVolume, RunContainerOptions, RuntimeNodeOptions
from pykubelet.kuberuntime.errors import ContainerConfigError, MissingSource
from pykubelet.objects.services import ClusterService, ServicePort, service_env
from tests.support.containers import amounts, make_container, make_facts, make_pod

CONFIG_MAPS = {"settings": {"color": "blue", "bad-name": "x", "A": "from map"}}
SECRETS = {"keys": {"token": b"s3cret", "raw": b"\xff\x00"}}


def config_map(name: str) -> Mapping[str, str]:
    if name not in CONFIG_MAPS:
        raise MissingSource(f'configmap "{name}" not found')
    return CONFIG_MAPS[name]


def secret(name: str) -> Mapping[str, bytes]:
    if name not in SECRETS:
        raise MissingSource(f'secret "{name}" not found')
    return SECRETS[name]


def facts(**more: Any) -> RunContainerOptions:
    more.setdefault("node", RuntimeNodeOptions(host_ips=("192.0.2.2",), allocatable=amounts(cpu="2")))
    more = {"config_map": config_map, "secret": secret, "pod_ips": ("10.0.0.1",)} | more
    return make_facts(**more)


def env_of(*env: EnvVar, env_from: list[EnvFromSource] | None = None, **more: Any) -> dict[str, str]:
    container = make_container(env=list(env), env_from=env_from or [])
    return container_env(make_pod(container, labels={"tier": "front"}), container, facts(**more))


def variable(name: str, **source: Any) -> EnvVar:
    return EnvVar(name=name, value_from=EnvVarSource(**source))


def test_container_env_references_earlier_variables_and_services() -> None:
    env = env_of(
        EnvVar(name="LATE", value="$(B)"),
        EnvVar(name="A", value="a"),
        EnvVar(name="B", value="$(A)$$(A) $(WEB_SERVICE_HOST) $(GIVEN)"),
        service_env={"WEB_SERVICE_HOST": "10.96.7.7", "A": "never"},
        device_options=DeviceRunOptions(env={"GIVEN": "device"}),
    )
    assert list(env.items()) == [
        ("GIVEN", "device"),
        ("LATE", "$(B)"),
        ("A", "a"),
        ("B", "a$(A) 10.96.7.7 $(GIVEN)"),
        ("WEB_SERVICE_HOST", "10.96.7.7"),
    ]


def test_container_env_env_overrides_env_from_sources() -> None:
    env = env_of(
        EnvVar(name="A", value="own"),
        env_from=[
            EnvFromSource(config_map_ref=NamedRef(name="settings")),
            EnvFromSource(prefix="K_", secret_ref=NamedRef(name="keys")),
            EnvFromSource(config_map_ref=NamedRef(name="absent", optional=True)),
            EnvFromSource(secret_ref=NamedRef(name="absent", optional=True)),
            EnvFromSource(),
        ],
    )
    assert list(env.items()) == [
        ("A", "own"),
        ("bad-name", "x"),
        ("color", "blue"),
        ("K_raw", "\udcff\x00"),
        ("K_token", "s3cret"),
    ]


def test_container_env_repeated_object_fetched_once() -> None:
    asked: list[str] = []

    def counting(name: str) -> Mapping[str, str]:
        asked.append(name)
        return config_map(name)

    ref = KeySelector(name="settings", key="color")
    env_of(
        variable("X", config_map_key_ref=ref),
        variable("Y", config_map_key_ref=ref),
        env_from=[EnvFromSource(config_map_ref=NamedRef(name="settings"))],
        config_map=counting,
    )
    assert asked == ["settings"]


@pytest.mark.parametrize(
    ("source", "value"),
    [
        ({"field_ref": ObjectFieldSelector(field_path="metadata.labels['tier']")}, "front"),
        ({"field_ref": ObjectFieldSelector(field_path="status.podIP")}, "10.0.0.1"),
        ({"field_ref": ObjectFieldSelector(field_path="status.hostIP")}, "192.0.2.2"),
        ({"resource_field_ref": ResourceFieldSelector(resource="limits.cpu")}, "2"),
        ({"config_map_key_ref": KeySelector(name="settings", key="color")}, "blue"),
        ({"config_map_key_ref": KeySelector(name="settings", key="absent", optional=True)}, None),
        ({"config_map_key_ref": KeySelector(name="absent", key="x", optional=True)}, None),
        ({"secret_key_ref": KeySelector(name="keys", key="token")}, "s3cret"),
        ({"secret_key_ref": KeySelector(name="absent", key="x", optional=True)}, None),
        ({}, ""),
    ],
)
def test_container_env_value_from_sources_resolved(source: dict[str, Any], value: str | None) -> None:
    assert env_of(variable("X", **source)).get("X") == value


@pytest.mark.parametrize(
    ("host", "ips", "host_network", "values"),
    [
        (("192.0.2.2",), ("10.0.0.1",), False, ("10.0.0.1", "10.0.0.1")),
        (("192.0.2.2",), ("fd00::1", "10.0.0.1"), False, ("10.0.0.1", "10.0.0.1,fd00::1")),
        (("2001:db8::2",), ("10.0.0.1", "fd00::1"), False, ("fd00::1", "fd00::1,10.0.0.1")),
        (("192.0.2.2", "2001:db8::2"), (), True, ("192.0.2.2", "192.0.2.2,2001:db8::2")),
    ],
)
def test_container_env_pod_ip_fields_ordered_by_host_ip_family(
    host: tuple[str, ...], ips: tuple[str, ...], host_network: bool, values: tuple[str, str]
) -> None:
    """In the host's network the runtime tells none: the host's are the pod's."""
    env = [
        variable(name, field_ref=ObjectFieldSelector(field_path=f"status.{name}"))
        for name in ("podIP", "podIPs")
    ]
    main = make_container(env=env)
    given = facts(node=RuntimeNodeOptions(host_ips=host), pod_ips=ips)
    found = container_env(make_pod(main, host_network=host_network), main, given)
    assert tuple(found.values()) == values


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ({"field_ref": ObjectFieldSelector(field_path="spec.everything")}, "unsupported fieldPath"),
        (
            {"resource_field_ref": ResourceFieldSelector(resource="limits.gpu")},
            "unsupported container resource",
        ),
        (
            {"config_map_key_ref": KeySelector(name="settings", key="absent")},
            "couldn't find key absent in ConfigMap shop/settings",
        ),
        ({"config_map_key_ref": KeySelector(name="absent", key="x")}, 'configmap "absent" not found'),
        (
            {"secret_key_ref": KeySelector(name="keys", key="absent")},
            "couldn't find key absent in Secret shop/keys",
        ),
        ({"secret_key_ref": KeySelector(name="absent", key="x")}, 'secret "absent" not found'),
    ],
)
def test_container_env_missing_value_raises_config_error(source: dict[str, Any], message: str) -> None:
    with pytest.raises(ContainerConfigError, match=message):
        env_of(variable("X", **source))


def test_container_env_optional_lookup_failure_raises() -> None:
    def broken(name: str) -> Mapping[str, str]:
        raise ContainerConfigError("the API server does not answer")

    with pytest.raises(ContainerConfigError, match="does not answer"):
        env_of(
            variable("X", config_map_key_ref=KeySelector(name="a", key="b", optional=True)), config_map=broken
        )


def test_container_env_no_api_server_error_names_secret() -> None:
    container = make_container(env_from=[EnvFromSource(secret_ref=NamedRef(name="keys"))])
    with pytest.raises(ContainerConfigError, match="secret keys: this node has no API server"):
        container_env(make_pod(container), container, RunContainerOptions(node=RuntimeNodeOptions()))


def test_container_env_services_unknown_raises_except_for_static_pods() -> None:
    container = make_container()
    with pytest.raises(ContainerConfigError, match="services have not yet been read"):
        container_env(make_pod(container), container, facts(service_env=None))
    static = make_pod(container, annotations={"kubernetes.io/config.source": "file"})
    assert container_env(static, container, facts(service_env=None)) == {}


def test_container_env_expansion_above_limit_raises() -> None:
    doubling = [EnvVar(name="V0", value="x" * 1000)]
    doubling += [EnvVar(name=f"V{n + 1}", value=f"$(V{n})$(V{n})") for n in range(60)]
    with pytest.raises(ContainerConfigError, match="more than"):
        env_of(*doubling)
    wide = [EnvVar(name="V", value="x" * 1_000_000)]
    wide += [EnvVar(name=f"W{n}", value="$(V)") for n in range(50)]
    with pytest.raises(ContainerConfigError, match="more than"):
        env_of(*wide)


def in_env_file(text: str, key: str) -> str:
    return parse_env_file(text.encode(errors="surrogateescape"), {key}).value(key)


def file_facts(text: str | None, **gates: bool) -> dict[str, Any]:
    def read(volume: str, path: str, key: str) -> str:
        if text is None:
            raise FileNotFoundError(path)
        return in_env_file(text, key)

    node = RuntimeNodeOptions(gates=FeatureGates().with_overrides(gates))
    return {"node": node, "env_file": read, "volumes": {"v": MountedVolume("/v")}}


def in_file(key: str, volume: str = "v", optional: bool | None = None) -> EnvVar:
    ref = FileKeySelector(volume_name=volume, path="app.env", key=key, optional=optional)
    return variable("X", file_key_ref=ref)


def test_container_env_file_key_ref_returns_value() -> None:
    assert env_of(in_file("K"), **file_facts("K='v'\n")) == {"X": "v"}
    assert env_of(in_file("ABSENT", optional=True), **file_facts("K='v'\n")) == {}
    assert env_of(in_file("K"), **file_facts("K='v'\n", EnvFiles=False)) == {"X": ""}


@pytest.mark.parametrize(
    ("wish", "text", "message"),
    [
        (in_file("ABSENT"), "K='v'\n", 'key "ABSENT" not found in file "app.env"'),
        (in_file("K"), "nonsense", "couldn't parse env file"),
        (in_file("K", optional=True), None, "couldn't parse env file"),
        (in_file("K", volume="other"), "", 'cannot find the volume "other"'),
    ],
)
def test_container_env_file_key_ref_missing_raises(wish: EnvVar, text: str | None, message: str) -> None:
    with pytest.raises(ContainerConfigError, match=message):
        env_of(wish, **file_facts(text))


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("", ""),
        ("K='v'", "v"),
        ("\n # comment\n\t K='v'  # why\n", "v"),
        ("K='a\nb=\"c\" $x'\n", 'a\nb="c" $x'),
        ("J='1'\nK='2'\nK='3'\n", "2"),
        ("K= 'v'\n", ""),
        ("K=''\n", ""),
        ("K='v'\r\nJ='w'\r\n", "v"),
        ("K='v'\nnonsense after it", "v"),
        ("K='v' # it's fine\n", "v"),
    ],
)
def test_parse_env_file_valid_text_returns_value(text: str, value: str) -> None:
    assert in_env_file(text, "K") == value


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("K", 1),
        ("\nK='v", 2),
        ("J='a\nb'\nK =\"v\"", 3),
        ("K=v", 1),
        ("K='v'w", 1),
        ("='v'", 1),
        ("K=\n", 1),
        ('K="v"', 1),
    ],
)
def test_parse_env_file_invalid_line_raises_with_line_number(text: str, line: int) -> None:
    with pytest.raises(ValueError, match=f"^line {line} of"):
        in_env_file(text, "K")


@given(st.text(alphabet="K='# \n\r\tv\x0b"))
def test_parse_env_file_any_text_returns_value_or_raises(text: str) -> None:
    value = ""
    with suppress(ValueError):
        value = in_env_file(text, "K")
    assert "'" not in value


@given(st.text(alphabet=st.characters(exclude_characters="'\r", exclude_categories=["Cs"])))
def test_parse_env_file_quoted_value_preserved(value: str) -> None:
    assert in_env_file(f"J='{value}'\nK='{value}'\n", "K") == value


def test_parse_env_file_line_limit_is_upstreams() -> None:
    """Verify the limit of upstream's scanner, also on lines within a value, but not behind the variable."""
    longest = MAX_LINE_BYTES - len("K=''")
    assert in_env_file(f"K='{'x' * longest}'\n", "K") == "x" * longest
    for text in (f"K='{'x' * (longest + 1)}'\n", f"\nK='a\n{'x' * (MAX_LINE_BYTES + 1)}'"):
        with pytest.raises(ValueError, match=rf"^line {1 + 2 * text.startswith(chr(10))} of .*at most 65535"):
            in_env_file(text, "K")
    assert in_env_file("K='v'\n" + " " * (MAX_LINE_BYTES + 1), "K") == "v"
    with pytest.raises(ValueError, match=r"^line 2 of"):
        in_env_file("K='v'\n" + " " * (MAX_LINE_BYTES + 1), "L")


KUBERNETES = ClusterService("default", "kubernetes", "10.96.0.1", (ServicePort(443, "https"),))
MY_DB = ClusterService("shop", "my-db", "fd00::7", (ServicePort(53, "dns-udp", "UDP"), ServicePort(80)))
HEADLESS = ClusterService("shop", "headless", "None", (ServicePort(1),))
ELSEWHERE = ClusterService("other", "web", "10.96.0.9", (ServicePort(1),))


def test_service_env_links_enabled_returns_namespace_services() -> None:
    env = service_env((MY_DB, KUBERNETES, HEADLESS, ELSEWHERE), "shop", links=True)
    assert env == service_env((KUBERNETES,), "shop", links=False) | {
        "MY_DB_SERVICE_HOST": "fd00::7",
        "MY_DB_SERVICE_PORT": "53",
        "MY_DB_SERVICE_PORT_DNS_UDP": "53",
        "MY_DB_PORT": "udp://[fd00::7]:53",
        "MY_DB_PORT_53_UDP": "udp://[fd00::7]:53",
        "MY_DB_PORT_53_UDP_PROTO": "udp",
        "MY_DB_PORT_53_UDP_PORT": "53",
        "MY_DB_PORT_53_UDP_ADDR": "fd00::7",
        "MY_DB_PORT_80_TCP": "tcp://[fd00::7]:80",
        "MY_DB_PORT_80_TCP_PROTO": "tcp",
        "MY_DB_PORT_80_TCP_PORT": "80",
        "MY_DB_PORT_80_TCP_ADDR": "fd00::7",
    }


def test_service_env_links_disabled_returns_api_server_only() -> None:
    env = service_env((MY_DB, KUBERNETES), "shop", links=False)
    assert env["KUBERNETES_SERVICE_HOST"] == "10.96.0.1"
    assert all(name.startswith("KUBERNETES_") for name in env)


def test_service_env_namespace_service_overrides_api_server_of_same_name() -> None:
    own = ClusterService("shop", "kubernetes", "10.96.5.5", (ServicePort(1),))
    for services in ((own, KUBERNETES), (KUBERNETES, own)):
        assert service_env(services, "shop", links=True)["KUBERNETES_SERVICE_HOST"] == "10.96.5.5"
