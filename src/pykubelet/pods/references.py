"""Which objects of the API a pod refers to.

A static pod must be able to start without an API server, so whoever accepts one asks here what it
would need. Kinds are named as the API names resources: `configmaps`, `secrets`, `serviceaccounts`,
`persistentvolumeclaims`, `resourceclaims`, `csidrivers`, `endpoints`, `clustertrustbundles`,
`podcertificates`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from pykubelet.api.pod import Container, Pod
from pykubelet.api.volume import Volume

Reference = tuple[str, str]
"""The field that refers, and the kind that it refers to."""

_VOLUME_KINDS = {
    "configMap": "configmaps",
    "secret": "secrets",
    "csi": "csidrivers",
    "glusterfs": "endpoints",
    "persistentVolumeClaim": "persistentvolumeclaims",
    "ephemeral": "persistentvolumeclaims",
    "azureFile": "secrets",
}
_PROJECTED_KINDS = {
    "configMap": "configmaps",
    "secret": "secrets",
    "serviceAccountToken": "serviceaccounts",
    "clusterTrustBundle": "clustertrustbundles",
    "podCertificate": "podcertificates",
}


def object_references(pod: Pod) -> Iterator[Reference]:
    """Give every field of the pod that needs an object of the API, with the object's kind."""
    spec = pod.spec
    if spec.service_account_name:
        yield "spec.serviceAccountName", "serviceaccounts"
    for index, secret in enumerate(spec.image_pull_secrets):
        if secret.name:
            yield f"spec.imagePullSecrets[{index}]", "secrets"
    for index, _ in enumerate(spec.resource_claims):
        yield f"spec.resourceClaims[{index}]", "resourceclaims"
    for kind, containers in (
        ("containers", spec.containers),
        ("initContainers", spec.init_containers),
        ("ephemeralContainers", spec.ephemeral_containers),
    ):
        for index, container in enumerate(containers):
            yield from _of_container(f"spec.{kind}[{index}]", container)
    for index, volume in enumerate(spec.volumes):
        yield from _of_volume(f"spec.volumes[{index}]", volume)


def _of_container(path: str, container: Container) -> Iterator[Reference]:
    for index, many in enumerate(container.env_from):
        if many.config_map_ref is not None:
            yield f"{path}.envFrom[{index}].configMapRef", "configmaps"
        if many.secret_ref is not None:
            yield f"{path}.envFrom[{index}].secretRef", "secrets"
    for index, variable in enumerate(container.env):
        given = variable.value_from
        if given is not None and given.config_map_key_ref is not None:
            yield f"{path}.env[{index}].valueFrom.configMapKeyRef", "configmaps"
        if given is not None and given.secret_key_ref is not None:
            yield f"{path}.env[{index}].valueFrom.secretKeyRef", "secrets"


def _of_volume(path: str, volume: Volume) -> Iterator[Reference]:
    for kind in volume.kinds:
        if kind in _VOLUME_KINDS:
            yield f"{path}.{kind}", _VOLUME_KINDS[kind]
    for index, source in enumerate(_listed((volume.projected or {}).get("sources"))):
        for kind in source if isinstance(source, dict) else ():
            if kind in _PROJECTED_KINDS:
                yield f"{path}.projected.sources[{index}].{kind}", _PROJECTED_KINDS[kind]
    # Old kinds of network volumes may name a secret to log in with.
    for kind, written in (
        ("cephfs", volume.cephfs),
        ("cinder", volume.cinder),
        ("flexVolume", volume.flex_volume),
        ("iscsi", volume.iscsi),
        ("rbd", volume.rbd),
        ("scaleIO", volume.scale_io),
        ("storageos", volume.storageos),
    ):
        if written is not None and written.get("secretRef"):
            yield f"{path}.{kind}.secretRef", "secrets"


def _listed(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []
