"""Volumes whose files the agent writes itself: configMap, secret, downwardAPI and projected.

A mode that is not given here is 0644; the API server writes it out, a manifest need not.
"""

from __future__ import annotations

from typing import Any

from pykubelet.api.meta import ObjectStruct
from pykubelet.api.selector import LabelSelector

DEFAULT_MODE = 0o644
DEFAULT_TOKEN_SECONDS = 3600


class ObjectFieldSelector(ObjectStruct):
    """A field of the pod itself."""

    field_path: str
    api_version: str = ""


class ResourceFieldSelector(ObjectStruct):
    """A resource of one of the pod's containers."""

    resource: str
    container_name: str = ""
    divisor: str | int = "0"


class KeyToPath(ObjectStruct):
    """One key of a configMap or secret, and the file that it becomes."""

    key: str
    path: str
    mode: int | None = None


class DownwardFile(ObjectStruct):
    """A file that says something about the pod: exactly one of a field and a resource."""

    path: str
    field_ref: ObjectFieldSelector | None = None
    resource_field_ref: ResourceFieldSelector | None = None
    mode: int | None = None


class ConfigMapVolume(ObjectStruct):
    """The files of a configMap: all its keys, or the given ones."""

    name: str = ""
    items: list[KeyToPath] = []
    default_mode: int | None = None
    optional: bool | None = None


class SecretVolume(ObjectStruct):
    """The files of a secret: all its keys, or the given ones."""

    secret_name: str = ""
    items: list[KeyToPath] = []
    default_mode: int | None = None
    optional: bool | None = None


class DownwardVolume(ObjectStruct):
    """Files about the pod itself."""

    items: list[DownwardFile] = []
    default_mode: int | None = None


class ProjectedKeys(ObjectStruct):
    """A configMap or secret among the sources of a projected volume."""

    name: str = ""
    items: list[KeyToPath] = []
    optional: bool | None = None


class ProjectedFields(ObjectStruct):
    """Files about the pod among the sources of a projected volume."""

    items: list[DownwardFile] = []


class ProjectedToken(ObjectStruct):
    """A token of the pod's service account; no audience means the API server."""

    path: str = ""
    audience: str = ""
    expiration_seconds: int | None = None


class ProjectedTrustBundle(ObjectStruct):
    """Root certificates: one bundle by name, or all of a signer that the selector chooses."""

    path: str = ""
    name: str | None = None
    signer_name: str | None = None
    label_selector: LabelSelector | None = None
    optional: bool | None = None


class Projection(ObjectStruct):
    """One source of a projected volume; exactly one of these."""

    config_map: ProjectedKeys | None = None
    secret: ProjectedKeys | None = None
    downward_api: ProjectedFields | None = None
    service_account_token: ProjectedToken | None = None
    cluster_trust_bundle: ProjectedTrustBundle | None = None
    pod_certificate: dict[str, Any] | None = None

    @property
    def kinds(self) -> tuple[str, ...]:
        """The kinds that are set, as the API writes them."""
        return tuple(wire for name, wire in _KINDS if getattr(self, name) is not None)


class ProjectedVolume(ObjectStruct):
    """The files of several sources in one volume; later sources win."""

    sources: list[Projection] = []
    default_mode: int | None = None


_KINDS = tuple(zip(Projection.__struct_fields__, Projection.__struct_encode_fields__, strict=True))
