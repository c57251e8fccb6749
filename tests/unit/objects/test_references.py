"""The configMaps and secrets that a pod refers to, wherever it may."""

from typing import Any

import pytest

from pykubelet.objects.references import config_map_names, secret_names, uses_trust_bundles
from tests.support.object_api import pod


def from_key(kind: str, name: str) -> dict[str, Any]:
    return {"name": "V", "valueFrom": {f"{kind}KeyRef": {"name": name, "key": "k"}}}


def volume(kind: str, **fields: Any) -> list[dict[str, Any]]:
    return [{"name": "v", kind: fields}]


CONTAINERS = {
    "containers": [
        {"name": "a", "envFrom": [{"configMapRef": {"name": "c1"}}, {"secretRef": {"name": "s1"}}]},
        {
            "name": "b",
            "env": [from_key("configMap", "c2"), from_key("secret", "s2"), {"name": "P", "value": "x"}],
        },
    ],
    "initContainers": [{"name": "i", "env": [from_key("configMap", "c3"), from_key("secret", "s3")]}],
    "ephemeralContainers": [{"name": "e", "envFrom": [{"configMapRef": {"name": "c4"}}, {"prefix": "X"}]}],
}


@pytest.mark.parametrize(
    ("spec", "config_maps", "secrets"),
    [
        ({}, "", ""),
        (CONTAINERS, "c1 c2 c3 c4", "s1 s2 s3"),
        ({"imagePullSecrets": [{"name": "s"}, {"name": ""}, {}]}, "", "s"),
        ({"volumes": volume("configMap", name="c")}, "c", ""),
        ({"volumes": volume("secret", secretName="s")}, "", "s"),
        ({"volumes": volume("azureFile", secretName="s", shareName="x")}, "", "s"),
        ({"volumes": volume("csi", driver="d", nodePublishSecretRef={"name": "s"})}, "", "s"),
        ({"volumes": volume("csi", driver="d")}, "", ""),
        ({"volumes": volume("cephfs", secretRef={"name": "s"})}, "", "s"),
        ({"volumes": volume("iscsi", secretRef={"name": "s"})}, "", "s"),
        ({"volumes": volume("scaleIO", secretRef={"name": "s"})}, "", "s"),
        ({"volumes": volume("rbd", secretRef="odd")}, "", ""),
        (
            {
                "volumes": volume(
                    "projected",
                    sources=[
                        {"configMap": {"name": "c"}},
                        {"secret": {"name": "s"}},
                        {"serviceAccountToken": {"path": "t"}},
                    ],
                )
            },
            "c",
            "s",
        ),
        ({"volumes": volume("emptyDir")}, "", ""),
    ],
)
def test_config_map_and_secret_names_cover_all_references(
    spec: dict[str, Any], config_maps: str, secrets: str
) -> None:
    referring = pod(**spec)
    assert config_map_names(referring) == set(config_maps.split())
    assert secret_names(referring) == set(secrets.split())
    assert not uses_trust_bundles(referring)
