"""ConfigMaps, Secrets and claims in manifests, for nodes without an API server.

`read_object` decodes and validates them as the API server does: `stringData` and base64 are resolved, the
namespace is set, keys are valid file names. Problems contain keys and field paths but no values, which may be
secret.

`LocalObjects` serves them to environment variables, volumes and image pulls; pods that use one are notified
of its changes immediately. `FileSource` offers the full set after every change.

Claims come from PersistentVolumeClaims and from the claim templates of StatefulSets (`workloads/`).

- Of two objects with the same name, the first file's is used and the other is a problem.
- An immutable object stays unchanged until its manifest is removed; a change is a problem. This is not
  remembered across kubelet restarts.
- Before the first scan of the directory no object is known, and none is reported as missing.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import msgspec

from pykubelet.api.core import ConfigMap, Secret
from pykubelet.api.meta import ObjectMeta, ObjectStruct, from_document
from pykubelet.api.names import dns_label_problem, dns_subdomain_problem
from pykubelet.api.pod import Pod
from pykubelet.api.storage import PersistentVolumeClaim
from pykubelet.config.errors import Problem, field_path
from pykubelet.objects.base import NoObjects, ObjectError, ObjectNotFound
from pykubelet.objects.references import claim_names, config_map_names, secret_names
from pykubelet.podconfig.validate_container import Problems, key_problem, named, problem_if
from pykubelet.util.text import quoted

LocalObject = ConfigMap | Secret | PersistentVolumeClaim
KINDS = ("ConfigMap", "Secret")
"""Kinds of objects, besides Pod, that a manifest may contain."""
LOCAL_KINDS = frozenset({"configmaps", "secrets", "persistentvolumeclaims"})
"""Resource names of these kinds, to which pods may refer on a node that serves them."""
MAX_DATA_BYTES = 1024**2
"""Maximum bytes of data per object, as in the API."""
_CONTENTS = ("data", "binaryData", "stringData")
_NEEDED_KEYS = {
    "kubernetes.io/dockercfg": (".dockercfg",),
    "kubernetes.io/dockerconfigjson": (".dockerconfigjson",),
    "kubernetes.io/ssh-auth": ("ssh-privatekey",),
    "kubernetes.io/tls": ("tls.crt", "tls.key"),
}
_BASIC_AUTH = "kubernetes.io/basic-auth"
_LINE_BREAKS = str.maketrans("", "", "\r\n")


class BadObject(Exception):
    """A document is not a valid object; each problem has its field path."""

    def __init__(self, *problems: Problem) -> None:
        super().__init__("; ".join(map(str, problems)))
        self.problems = problems


def read_object(kind: str, document: Mapping[str, Any]) -> ConfigMap | Secret:
    """Decode a ConfigMap or Secret. Raises BadObject, or ValueError with the field path."""
    written = from_document(_ManifestObject, _with_texts(document))
    meta = ObjectMeta(name=written.metadata.name, namespace=written.metadata.namespace or "default")
    if kind == "ConfigMap":
        found: ConfigMap | Secret = ConfigMap(
            metadata=meta,
            data=written.data,
            binary_data=_decoded("binaryData", written.binary_data),
            immutable=written.immutable,
        )
    else:
        plain = {key: value.encode() for key, value in written.string_data.items()}
        found = Secret(
            metadata=meta,
            type=written.type or "Opaque",
            data=_decoded("data", written.data) | plain,
            immutable=written.immutable,
        )
    if problems := tuple(_problems(found)):
        raise BadObject(*problems)
    return found


def title(found: LocalObject) -> str:
    """Return the description of an object for messages: `configMap default/page`."""
    kind = type(found).__name__
    kind = f"{kind[0].lower()}{kind[1:]}"
    return f"{kind} {found.metadata.namespace}/{found.metadata.name}"


class _ManifestObject(ObjectStruct):
    """A ConfigMap or Secret as written in the manifest."""

    metadata: ObjectMeta = msgspec.field(default_factory=ObjectMeta)
    type: str = ""
    immutable: bool | None = None
    data: dict[str, str] = {}
    binary_data: dict[str, str] = {}
    string_data: dict[str, str] = {}

    def __repr__(self) -> str:
        return f"_ManifestObject({self.metadata.namespace}/{self.metadata.name})"


def _with_texts(document: Mapping[str, Any]) -> dict[str, Any]:
    """Verify that all values are strings: an unquoted `8080` or `yes` in YAML is not, a common mistake."""
    checked = {name: value for name, value in document.items() if value is not None}
    problems = []
    for name in _CONTENTS:
        values = checked.get(name)
        if not isinstance(values, dict):
            continue
        # A key without a value exists and is empty.
        checked[name] = values = {key: "" if value is None else value for key, value in values.items()}
        problems += [
            Problem(field_path(name, key), problem)
            for key, value in values.items()
            if (problem := _text_problem(value))
        ]
    if problems:
        raise BadObject(*problems)
    return checked


def _text_problem(value: object) -> str:
    if not isinstance(value, str):
        return "must be text: put it in quotes"
    try:
        value.encode()
    except UnicodeEncodeError:
        return "holds half of a character: write whole ones"
    return ""


def _decoded(field: str, values: Mapping[str, str]) -> dict[str, bytes]:
    decoded, problems = {}, []
    for key, value in values.items():
        try:
            decoded[key] = base64.b64decode(value.translate(_LINE_BREAKS).encode("ascii"), validate=True)
        except (binascii.Error, UnicodeEncodeError):
            remedy = "stringData" if field == "data" else "data"
            problems.append(
                Problem(field_path(field, key), f"is not base64: plain text belongs under {remedy}")
            )
    if problems:
        raise BadObject(*problems)
    return decoded


def _problems(found: ConfigMap | Secret) -> Problems:
    yield from named("metadata.name", found.metadata.name, dns_subdomain_problem)
    yield from named("metadata.namespace", found.metadata.namespace, dns_label_problem)
    for key in found.data:
        yield from named(field_path("data", key), key, key_problem)
    size = sum(map(len, found.data.values()))
    if isinstance(found, ConfigMap):
        for key in found.binary_data:
            yield from named(field_path("binaryData", key), key, key_problem)
            yield from problem_if(field_path("binaryData", key), "is in data, too", key in found.data)
        size = sum(len(text.encode()) for text in found.data.values())
        size += sum(map(len, found.binary_data.values()))
    else:
        yield from _type_problems(found)
    yield from problem_if(
        "data", f"holds more than {MAX_DATA_BYTES // 1024**2} MiB: split it", size > MAX_DATA_BYTES
    )


def _type_problems(secret: Secret) -> Problems:
    """Yield the problems of a Secret whose type requires certain keys."""
    for key in _NEEDED_KEYS.get(secret.type, ()):
        path = field_path("data", key)
        yield from problem_if(path, f"must be set in a secret of type {secret.type}", key not in secret.data)
        if key.startswith(".docker") and key in secret.data:
            yield from problem_if(path, "must be a JSON object", not _is_json_object(secret.data[key]))
    if secret.type == _BASIC_AUTH and not {"username", "password"} & secret.data.keys():
        yield Problem("data", f"must have a username or a password in a secret of type {quoted(secret.type)}")


def _is_json_object(data: bytes) -> bool:
    try:
        return isinstance(msgspec.json.decode(data), dict)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return False


ObjectKey = tuple[str, str, str]
"""Kind (`ConfigMap`, `Secret`, `PersistentVolumeClaim`), namespace and name."""


class LocalObjects(NoObjects):
    """PodObjects of a node without an API server; requests for tokens and trust bundles fail."""

    def __init__(self) -> None:
        self._objects: dict[ObjectKey, LocalObject] | None = None
        self._uses: dict[str, frozenset[ObjectKey]] = {}
        self._listeners: list[Callable[[str], None]] = []

    def offer(self, objects: Iterable[tuple[str, LocalObject]]) -> list[Problem]:
        """Replace the full set, given with the files in order; return the problems."""
        before = self._objects or {}
        desired, problems = first_of_each(objects)
        after, changes = with_immutable(before, desired)
        self._objects = after
        changed = {key for key in before.keys() | after.keys() if before.get(key) != after.get(key)}
        self._notify(changed)
        return [*problems, *changes]

    def register(self, pod: Pod) -> None:
        """Record the objects that a pod refers to, to notify it of changes."""
        namespace = pod.metadata.namespace
        self._uses[pod.uid] = frozenset(
            {("ConfigMap", namespace, name) for name in config_map_names(pod)}
            | {("Secret", namespace, name) for name in secret_names(pod)}
            | {("PersistentVolumeClaim", namespace, name) for name in claim_names(pod)}
        )

    def unregister(self, uid: str) -> None:
        """Remove a pod."""
        self._uses.pop(uid, None)

    async def config_map(self, pod: Pod, name: str) -> ConfigMap:
        """Return a configMap of the pod's namespace. Raises ObjectError, ObjectNotFound if it is missing."""
        found = self._get("ConfigMap", pod, name)
        assert isinstance(found, ConfigMap)
        return found

    async def secret(self, pod: Pod, name: str) -> Secret:
        """Return a secret of the pod's namespace. Raises ObjectError, ObjectNotFound if it is missing."""
        found = self._get("Secret", pod, name)
        assert isinstance(found, Secret)
        return found

    def add_listener(self, listener: Callable[[str], None]) -> None:
        """Add a listener, called with the UID of a pod when an object it uses changed; it must not block."""
        self._listeners.append(listener)

    def claim(self, namespace: str, name: str) -> PersistentVolumeClaim:
        """Return a claim. Raises ObjectError, ObjectNotFound if it is missing."""
        found = self._find("PersistentVolumeClaim", namespace, name)
        assert isinstance(found, PersistentVolumeClaim)
        return found

    def _get(self, kind: str, pod: Pod, name: str) -> LocalObject:
        return self._find(kind, pod.metadata.namespace, name)

    def _find(self, kind: str, namespace: str, name: str) -> LocalObject:
        if self._objects is None:
            raise ObjectError(f'{kind.lower()} "{name}" is not known yet: no manifest has been read so far')
        found = self._objects.get((kind, namespace, name))
        if found is None:
            raise ObjectNotFound(f'{kind.lower()} "{name}" not found')
        return found

    def _notify(self, changed: set[ObjectKey]) -> None:
        for uid in sorted(uid for uid, uses in self._uses.items() if not changed.isdisjoint(uses)):
            for listener in self._listeners:
                listener(uid)


ObjectsByKey = dict[ObjectKey, tuple[str, LocalObject]]


def first_of_each(objects: Iterable[tuple[str, LocalObject]]) -> tuple[ObjectsByKey, list[Problem]]:
    """Return the first object of each name; the others, identified by their file, are problems."""
    first: ObjectsByKey = {}
    problems = []
    for origin, found in objects:
        key = (type(found).__name__, found.metadata.namespace, found.metadata.name)
        if key in first:
            where = "here" if first[key][0] == origin else f"in {first[key][0]}"
            problems.append(Problem(origin, f"{title(found)} is already {where}: rename one, or remove it"))
        else:
            first[key] = origin, found
    return first, problems


def _is_immutable(found: LocalObject) -> bool:
    return not isinstance(found, PersistentVolumeClaim) and bool(found.immutable)


def with_immutable(
    before: Mapping[ObjectKey, LocalObject], desired: ObjectsByKey
) -> tuple[dict[ObjectKey, LocalObject], list[Problem]]:
    """Return the new state of the objects: an immutable one stays, and a change of it is a problem."""
    after: dict[ObjectKey, LocalObject] = {}
    problems = []
    for key, (origin, found) in desired.items():
        old = before.get(key)
        if old is not None and _is_immutable(old) and old != found:
            after[key] = old
            problems.append(
                Problem(
                    origin,
                    f"{title(found)} is immutable and has changed: the old one stays in use; "
                    "give the new one another name, or remove the manifest first",
                )
            )
        else:
            after[key] = found
    return after, problems
