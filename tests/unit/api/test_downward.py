import pytest
from hypothesis import given
from hypothesis import strategies as st

from pykubelet.api.downward_api import field_value, format_map, quote, resource_value
from pykubelet.api.meta import ObjectMeta, Resources
from pykubelet.api.pod import (
    Container,
    ObjectFieldSelector,
    Pod,
    PodSpec,
    ResourceFieldSelector,
    ResourceRequirements,
)
from pykubelet.api.quantity import Quantity


def amounts(**values: str) -> Resources:
    return {name.replace("_", "-"): Quantity.parse(value) for name, value in values.items()}


POD = Pod(
    metadata=ObjectMeta(
        name="web",
        namespace="shop",
        uid="u-1",
        labels={"app": "web", "example.com/tier": 'a "b"'},
        annotations={"Note": "x\ny"},
    ),
    spec=PodSpec(
        node_name="vm",
        service_account_name="sa",
        containers=[
            Container(
                name="main",
                resources=ResourceRequirements(
                    limits={**amounts(cpu="1500m", memory="64Mi"), "hugepages-2Mi": Quantity.parse("4Mi")},
                    requests=amounts(cpu="100m", ephemeral_storage="1Gi"),
                ),
            ),
            Container(name="bare"),
        ],
        init_containers=[Container(name="first")],
    ),
)
NODE = amounts(cpu="2", memory="24580016Ki", ephemeral_storage="100Gi")


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("metadata.name", "web"),
        ("metadata.namespace", "shop"),
        ("metadata.uid", "u-1"),
        ("metadata.labels", 'app="web"\nexample.com/tier="a \\"b\\""'),
        ("metadata.annotations", 'Note="x\\ny"'),
        ("metadata.labels['app']", "web"),
        ("metadata.labels['example.com/tier']", 'a "b"'),
        ("metadata.labels['absent']", ""),
        ("metadata.annotations['Note']", "x\ny"),
        ("spec.nodeName", "vm"),
        ("spec.serviceAccountName", "sa"),
        ("status.podIP", "10.0.0.1"),
        ("status.podIPs", "10.0.0.1,fd00::1"),
        ("status.hostIP", "192.0.2.2"),
        ("status.hostIPs", "192.0.2.2,2001:db8::2"),
    ],
)
def test_field_value_supported_path_returns_value(path: str, value: str) -> None:
    selector = ObjectFieldSelector(field_path=path)
    assert (
        field_value(selector, POD, pod_ips=["10.0.0.1", "fd00::1"], host_ips=["192.0.2.2", "2001:db8::2"])
        == value
    )


@pytest.mark.parametrize(
    "path",
    [
        "",
        "spec.containers",
        "metadata.labels['']",
        "metadata.labels['a b']",
        "spec.nodeName['x']",
        "status.phase",
    ],
)
def test_field_value_unsupported_path_raises_value_error(path: str) -> None:
    with pytest.raises(ValueError):
        field_value(ObjectFieldSelector(field_path=path), POD)


def test_field_value_other_api_version_raises_value_error() -> None:
    with pytest.raises(ValueError, match="unsupported pod version: v2"):
        field_value(ObjectFieldSelector(field_path="metadata.name", api_version="v2"), POD)


def test_field_value_addresses_unknown_pod_ip_empty_host_ip_raises() -> None:
    assert field_value(ObjectFieldSelector(field_path="status.podIP"), POD) == ""
    for path in ("status.hostIP", "status.hostIPs"):
        with pytest.raises(ValueError, match="host IP unknown"):
            field_value(ObjectFieldSelector(field_path=path), POD)


@pytest.mark.parametrize(
    ("resource", "container", "divisor", "value"),
    [
        ("limits.cpu", "", "0", "2"),
        ("limits.cpu", "", "1m", "1500"),
        ("limits.cpu", "", 1, "2"),
        ("limits.memory", "", "1Mi", "64"),
        ("limits.memory", "", "1Gi", "1"),
        ("limits.memory", "", "0", "67108864"),
        ("limits.hugepages-2Mi", "", "1Mi", "4"),
        ("limits.ephemeral-storage", "", "1Gi", "100"),
        ("requests.cpu", "", "1m", "100"),
        ("requests.memory", "", "1", "0"),
        ("requests.ephemeral-storage", "", "1Gi", "1"),
        ("limits.cpu", "bare", "1", "2"),
        ("limits.memory", "bare", "1Ki", "24580016"),
        ("requests.cpu", "bare", "1m", "0"),
        ("limits.cpu", "first", "1", "0"),
    ],
)
def test_resource_value_supported_resource_divided_and_rounded(
    resource: str, container: str, divisor: str | int, value: str
) -> None:
    selector = ResourceFieldSelector(resource=resource, container_name=container, divisor=divisor)
    assert resource_value(selector, POD, POD.spec.containers[0], NODE) == value


def test_resource_value_pod_level_limit_precedes_node_allocatable() -> None:
    pod = Pod(
        spec=PodSpec(
            containers=[Container(name="main")], resources=ResourceRequirements(limits=amounts(cpu="500m"))
        )
    )
    selector = ResourceFieldSelector(resource="limits.cpu", divisor="1m")
    assert resource_value(selector, pod, pod.spec.containers[0], NODE) == "500"
    assert resource_value(selector, pod, pod.spec.containers[0], NODE, pod_level=False) == "2000"


@pytest.mark.parametrize(
    ("resource", "container", "message"),
    [
        ("limits.gpu", "", "unsupported container resource"),
        ("cpu", "", "unsupported container resource"),
        ("limits.cpu", "absent", "container absent not found"),
    ],
)
def test_resource_value_unsupported_resource_raises_value_error(
    resource: str, container: str, message: str
) -> None:
    selector = ResourceFieldSelector(resource=resource, container_name=container)
    with pytest.raises(ValueError, match=message):
        resource_value(selector, POD, POD.spec.containers[0], NODE)


@pytest.mark.parametrize(
    ("text", "quoted"),
    [
        ("", '""'),
        ("plain é 😀", '"plain é 😀"'),
        ('\\ " \t\n\r\v\a\b\f', r'"\\ \" \t\n\r\v\a\b\f"'),
        ("\x00\x7f", r'"\x00\x7f"'),
        ("\u200b\u00a0\U000e0001", r'"\u200b\u00a0\U000e0001"'),
    ],
)
def test_quote_matches_go_strconv(text: str, quoted: str) -> None:
    assert quote(text) == quoted


@given(st.dictionaries(st.text(), st.text()))
def test_format_map_one_line_per_key(values: dict[str, str]) -> None:
    values = {key.replace("\n", ""): value for key, value in values.items()}
    assert format_map(values).count("\n") == max(0, len(values) - 1)
