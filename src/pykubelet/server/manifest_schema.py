"""Messages of the manifest endpoints, shared by the servers and the command line."""

from __future__ import annotations

import msgspec


class ManifestPod(msgspec.Struct, kw_only=True):
    """Identity of a manifest's pod on this node."""

    namespace: str
    name: str
    uid: str


class Manifest(msgspec.Struct, kw_only=True):
    """One file of the static pod directory."""

    path: str
    pods: list[ManifestPod] = []
    objects: list[str] = []
    """Other objects in the file, such as `configMap default/page` and `deployment default/web`."""
    warnings: list[str] = []
    """Fields that this node ignores."""
    problems: list[str] = []
    """Validation errors; empty for a valid file."""


class Manifests(msgspec.Struct, kw_only=True):
    """Listing of the static pod directory."""

    items: list[Manifest] = []


class ManifestErrorResponse(msgspec.Struct, kw_only=True):
    """Error response to a manifest request; `problems` are validation errors, one line each."""

    message: str
    problems: list[str] = []
