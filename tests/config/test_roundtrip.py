"""What is written reads back as the same configuration, field by field, as data, JSON and YAML."""

import json
from typing import Annotated, Any, get_args, get_origin, get_type_hints

import msgspec
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pykubelet.api.duration import Duration
from pykubelet.api.quantity import Quantity
from pykubelet.config.decode import decode
from pykubelet.config.documents import read_text_document
from pykubelet.config.encode import to_document, to_yaml
from pykubelet.config.types import IntRange, KubeletConfiguration, PointerMark, QuantityMark

TEXT = st.text(
    st.characters(exclude_characters="\0", exclude_categories=["Cs"]), max_size=6
) | st.sampled_from(
    [
        "y",
        "no",
        "null",
        "~",
        "1e3",
        "010",
        "0o7",
        "1_0",
        "<<",
        "=",
        "- a",
        "a: b",
        "#",
        " a ",
        "10%",
        "2020-01-01",
        "*a",
    ]
)


def values(hint: Any, marks: tuple[Any, ...] = ()) -> st.SearchStrategy[Any]:
    """Make values of a field's type that a file can express."""
    if get_origin(hint) is Annotated:
        return values(hint.__origin__, (*marks, *hint.__metadata__))
    if type(None) in get_args(hint):
        [inner] = [part for part in get_args(hint) if part is not type(None)]
        return st.none() | values(inner, marks)
    if get_origin(hint) is list:
        return st.lists(values(get_args(hint)[0]), max_size=3)
    if get_origin(hint) is dict:
        return st.dictionaries(TEXT, values(get_args(hint)[1]), max_size=3)
    if issubclass(hint, msgspec.Struct):
        return structs(hint)
    if hint is int:
        [limits] = [mark for mark in marks if isinstance(mark, IntRange)]
        return st.integers(limits.low, limits.high)
    if hint is Duration:
        return st.integers(-(2**63), 2**63 - 1).map(Duration)
    if any(isinstance(mark, QuantityMark) for mark in marks):
        return st.integers(-(10**20), 10**20).map(lambda nanos: str(Quantity(nanos)))
    return {bool: st.booleans(), float: st.floats(-1e9, 1e9), str: TEXT}[hint]


def structs(cls: type[msgspec.Struct]) -> st.SearchStrategy[Any]:
    hints = get_type_hints(cls, include_extras=True)
    given_fields = {}
    for field in msgspec.structs.fields(cls):
        hint = hints[field.name]
        strategy = values(hint)
        if PointerMark() not in getattr(hint, "__metadata__", ()) and field.default:
            # A zero here would mean the default, so no file can say it.
            strategy = strategy.filter(bool)
        given_fields[field.name] = (
            st.just(field.default) if field.name in ("kind", "api_version") else strategy
        )
    return st.fixed_dictionaries({}, optional=given_fields).map(lambda chosen: cls(**chosen))


ROUND_TRIPS = settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large]
)


@ROUND_TRIPS
@given(structs(KubeletConfiguration))
def test_any_configuration_round_trips(config: KubeletConfiguration) -> None:
    document = to_document(config)
    assert decode(KubeletConfiguration, document) == (config, [])
    assert read_text_document(json.dumps(document), "json") == document
    assert read_text_document(to_yaml(config), "yaml") == document


def test_the_defaults_round_trip() -> None:
    assert decode(KubeletConfiguration, to_document(KubeletConfiguration())) == (KubeletConfiguration(), [])


def test_the_document_shows_every_field_in_json_types() -> None:
    document = to_document(KubeletConfiguration())
    assert list(document)[:2] == ["kind", "apiVersion"]
    assert document["kind"] == "KubeletConfiguration"
    assert document["apiVersion"] == "kubelet.config.k8s.io/v1beta1"
    assert document["syncFrequency"] == "1m0s"
    assert document["imageMaximumGCAge"] == "0s"
    assert document["logging"]["flushFrequency"] == "5s"
    assert document["logging"]["options"]["json"] == {"splitStream": False, "infoBufferSize": "0"}
    assert document["staticPodPath"] == ""
    assert document["maxParallelImagePulls"] is None
    assert document["memorySwap"] == {"swapBehavior": ""}
    assert json.loads(json.dumps(document)) == document


def test_yaml_quotes_what_kubernetes_would_misread() -> None:
    text = to_yaml(KubeletConfiguration(cluster_domain="y", provider_id="1e3", pod_cidr="010"))
    assert 'clusterDomain: "y"\n' in text
    assert 'providerID: "1e3"\n' in text
    assert 'podCIDR: "010"\n' in text
    assert "cgroupDriver: cgroupfs\n" in text
