"""What is said of manifests over the wire: shared by the servers and the command line."""

from __future__ import annotations

import msgspec


class ManifestPod(msgspec.Struct, kw_only=True):
    """A pod of a manifest, as the node has it."""

    namespace: str
    name: str
    uid: str


class Manifest(msgspec.Struct, kw_only=True):
    """One file of the manifests folder."""

    path: str
    pods: list[ManifestPod] = []
    objects: list[str] = []
    """ConfigMaps and Secrets in it, such as `configMap default/page`."""
    problems: list[str] = []
    """Why the node cannot use it."""


class Manifests(msgspec.Struct, kw_only=True):
    """The manifests folder."""

    items: list[Manifest] = []


class ManifestRefusal(msgspec.Struct, kw_only=True):
    """Why a request for a manifest was refused; `problems` are of the manifest, one line each."""

    message: str
    problems: list[str] = []
