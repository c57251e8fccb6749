"""What is written reads back as the same configuration, field by field, as data, JSON and YAML."""

import json

from hypothesis import HealthCheck, given, settings

from pykubelet.config.codec import decode, to_document, to_yaml
from pykubelet.config.documents import read_text_document
from pykubelet.config.types import KubeletConfiguration
from tests.unit.config.strategies import structs

ROUND_TRIPS = settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large]
)


@ROUND_TRIPS
@given(structs(KubeletConfiguration))
def test_kubelet_configuration_any_value_document_json_and_yaml_roundtrip(
    config: KubeletConfiguration,
) -> None:
    document = to_document(config)
    assert decode(KubeletConfiguration, document) == (config, [])
    assert read_text_document(json.dumps(document), "json") == document
    assert read_text_document(to_yaml(config), "yaml") == document


def test_kubelet_configuration_defaults_roundtrip() -> None:
    assert decode(KubeletConfiguration, to_document(KubeletConfiguration())) == (KubeletConfiguration(), [])


def test_to_document_contains_all_fields_in_json_types() -> None:
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


def test_to_yaml_ambiguous_scalars_quoted() -> None:
    text = to_yaml(KubeletConfiguration(cluster_domain="y", provider_id="1e3", pod_cidr="010"))
    assert 'clusterDomain: "y"\n' in text
    assert 'providerID: "1e3"\n' in text
    assert 'podCIDR: "010"\n' in text
    assert "cgroupDriver: cgroupfs\n" in text
