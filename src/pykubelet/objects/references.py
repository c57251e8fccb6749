"""API objects that a pod refers to.

A static pod must be able to start without an API server, so its validation checks `object_references`.
Kinds are the API's resource names: `configmaps`, `secrets`, `serviceaccounts`, `persistentvolumeclaims`,
`persistentvolumes`, `resourceclaims`, `csidrivers`, `endpoints`, `clustertrustbundles`, `podcertificates`.
The object caches use `config_map_names`, `secret_names` and `claim_names`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from pykubelet.api.pod import Container, KeySelector, NamedRef, Pod
from pykubelet.api.volume import Projection, Volume

Reference = tuple[str, str]
"""Path of the referring field, and the kind that it refers to."""
ALL_KINDS = frozenset(
    {
        "clustertrustbundles",
        "configmaps",
        "csidrivers",
        "endpoints",
        "persistentvolumeclaims",
        "persistentvolumes",
        "podcertificates",
        "resourceclaims",
        "secrets",
        "serviceaccounts",
    }
)
_VOLUME_KINDS = {
    "configMap": "configmaps",
    "secret": "secrets",
    "csi": "csidrivers",
    "glusterfs": "endpoints",
    "persistentVolumeClaim": "persistentvolumeclaims",
    "ephemeral": "persistentvolumes",
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
    """Yield every field of the pod that requires an API object, with the object's kind."""
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
            yield from _container_references(f"spec.{kind}[{index}]", container)
    for index, volume in enumerate(spec.volumes):
        yield from _volume_references(f"spec.volumes[{index}]", volume)


def config_map_names(pod: Pod) -> set[str]:
    """Return the names of the configMaps that a pod refers to, in its own namespace."""
    names = {ref.name for ref in _env_references(pod, "config_map_ref", "config_map_key_ref")}
    for volume in pod.spec.volumes:
        if volume.config_map is not None:
            names.add(volume.config_map.name)
        names |= {source.config_map.name for source in _projected(volume) if source.config_map is not None}
    return names - {""}


def secret_names(pod: Pod) -> set[str]:
    """Return the names of the secrets that a pod refers to, in its own namespace."""
    names = {ref.name for ref in pod.spec.image_pull_secrets}
    names |= {ref.name for ref in _env_references(pod, "secret_ref", "secret_key_ref")}
    for volume in pod.spec.volumes:
        if volume.secret is not None:
            names.add(volume.secret.secret_name)
        names.add(_text(volume.azure_file, "secretName"))
        if volume.csi is not None and volume.csi.node_publish_secret_ref is not None:
            names.add(volume.csi.node_publish_secret_ref.name)
        names |= {secret for _, secret in _volume_secrets(volume)}
        names |= {source.secret.name for source in _projected(volume) if source.secret is not None}
    return names - {""}


def claim_names(pod: Pod) -> set[str]:
    """Return the names of the persistent volume claims that a pod refers to."""
    claims = (volume.persistent_volume_claim for volume in pod.spec.volumes)
    return {claim.claim_name for claim in claims if claim is not None} - {""}


def uses_trust_bundles(pod: Pod) -> bool:
    """Return whether a projected volume of the pod contains a ClusterTrustBundle."""
    return any(
        source.cluster_trust_bundle is not None
        for volume in pod.spec.volumes
        for source in _projected(volume)
    )


def _env_references(pod: Pod, env_from_field: str, env_field: str) -> Iterator[NamedRef | KeySelector]:
    spec = pod.spec
    for container in (*spec.containers, *spec.init_containers, *spec.ephemeral_containers):
        sources = [getattr(source, env_from_field) for source in container.env_from]
        sources += [getattr(variable.value_from, env_field, None) for variable in container.env]
        yield from (source for source in sources if source is not None)


def _container_references(path: str, container: Container) -> Iterator[Reference]:
    for index, source in enumerate(container.env_from):
        if source.config_map_ref is not None:
            yield f"{path}.envFrom[{index}].configMapRef", "configmaps"
        if source.secret_ref is not None:
            yield f"{path}.envFrom[{index}].secretRef", "secrets"
    for index, variable in enumerate(container.env):
        value_from = variable.value_from
        if value_from is not None and value_from.config_map_key_ref is not None:
            yield f"{path}.env[{index}].valueFrom.configMapKeyRef", "configmaps"
        if value_from is not None and value_from.secret_key_ref is not None:
            yield f"{path}.env[{index}].valueFrom.secretKeyRef", "secrets"


def _volume_references(path: str, volume: Volume) -> Iterator[Reference]:
    for kind in volume.kinds:
        if kind in _VOLUME_KINDS:
            yield f"{path}.{kind}", _VOLUME_KINDS[kind]
    for index, source in enumerate(_projected(volume)):
        for kind in source.kinds:
            if kind in _PROJECTED_KINDS:
                yield f"{path}.projected.sources[{index}].{kind}", _PROJECTED_KINDS[kind]
    for kind, _ in _volume_secrets(volume):
        yield f"{path}.{kind}.secretRef", "secrets"


def _volume_secrets(volume: Volume) -> Iterator[tuple[str, str]]:
    """Yield volume type and secret name of network volumes with a credentials `secretRef`."""
    for kind, typed in (("flexVolume", volume.flex_volume), ("iscsi", volume.iscsi)):
        if typed is not None and typed.secret_ref is not None:
            yield kind, typed.secret_ref.name
    for kind, written in (
        ("cephfs", volume.cephfs),
        ("cinder", volume.cinder),
        ("rbd", volume.rbd),
        ("scaleIO", volume.scale_io),
        ("storageos", volume.storageos),
    ):
        if written is not None and written.get("secretRef"):
            yield kind, _text(written["secretRef"], "name")


def _projected(volume: Volume) -> list[Projection]:
    return volume.projected.sources if volume.projected is not None else []


def _text(mapping: Any, key: str) -> str:
    value = mapping.get(key) if isinstance(mapping, dict) else None
    return value if isinstance(value, str) else ""
