"""Recordings of the reference kubelet (`data/golden`, see its README), and ours in the same clothes.

What is made equal here is what the README names: uids, addresses, times, ids, random names, the root
directory, and the order of variables.
"""

import base64
import json
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import yaml
from google.protobuf.json_format import MessageToDict
from google.protobuf.message import Message

from pykubelet.cri import runtime_pb2 as pb
from tests.support.cri_recorder import Recording

GOLDEN = Path(__file__).parents[1] / "data" / "golden"
IMAGE = "registry.local/busybox:1.35"
"""The image of all given pods."""

Document = dict[str, Any]


def given(stem: str, elsewhere: Mapping[str, str] | None = None) -> list[Document]:
    """The objects of a `given-*.yaml`; `elsewhere` has other words for some of its own."""
    text = (GOLDEN / f"given-{stem}.yaml").read_text()
    for theirs, ours in (elsewhere or {}).items():
        text = text.replace(theirs, ours)
    return list(yaml.safe_load_all(text))


def golden(name: str) -> Document:
    """A recorded object."""
    document: Document = json.loads((GOLDEN / name).read_text())
    return document


def recording_of(stem: str) -> dict[str, Document]:
    """What the reference did with the given pods: `cri`, `status` and `events` by the pod's name."""
    recording: dict[str, Document] = json.loads((GOLDEN / f"given-{stem}.json").read_text())
    return recording


def given_pods(*stems: str) -> list[tuple[str, str]]:
    """All recorded pods, as stem and name."""
    return [(stem, name) for stem in stems for name in recording_of(stem)]


def plain(document: Any, stands_for: Iterable[tuple[str, str]]) -> Any:
    """Ours in the recording's clothes: names, paths and addresses as given, then ids, names and times."""
    text = json.dumps(document)
    for ours, theirs in stands_for:
        text = text.replace(ours, theirs)
    text = re.sub(r"(containers/[\w-]+/)[0-9a-f]{8}\b", r"\1RAND", text)
    text = re.sub(r"(containerd://|sha256:)[0-9a-f]{64}", r"\1ID", text)
    return _timeless(json.loads(text))


def _timeless(value: Any, key: str = "") -> Any:
    if isinstance(value, dict):
        return {name: _timeless(inner, name) for name, inner in value.items()}
    if isinstance(value, list):
        return [_timeless(inner) for inner in value]
    is_time = key.endswith(("Time", "At", "Timestamp")) or key == "kubernetes.io/config.seen"
    return "TIME" if value and is_time else value


def requests_of(recording: Recording, uid: str) -> list[Document]:
    """The first sandbox of a pod and the first of each of its containers that the agent asked for."""
    found: dict[tuple[str, str], Document] = {}
    for method, request in recording.requests("RunPodSandbox", "CreateContainer"):
        config: Any
        if method == "RunPodSandbox":
            config = pb.RunPodSandboxRequest.FromString(request).config
            owner = config.metadata.uid
        else:
            config = pb.CreateContainerRequest.FromString(request).config
            owner = config.labels["io.kubernetes.pod.uid"]
        if owner == uid:
            found.setdefault(
                (method, config.metadata.name), {"method": method, "config": as_recorded(config)}
            )
    return list(found.values())


def calls_about(recording: Recording, uid: str) -> list[str]:
    """The methods that were called about a pod, in their order: whatever named it or a part of it."""
    names, found = {uid.encode()}, []
    for call in recording.calls():
        if not any(name in call.request for name in names):
            continue
        found.append(call.method)
        if call.answer and call.method == "RunPodSandbox":
            names.add(pb.RunPodSandboxResponse.FromString(call.answer).pod_sandbox_id.encode())
        if call.answer and call.method == "CreateContainer":
            names.add(pb.CreateContainerResponse.FromString(call.answer).container_id.encode())
    return found


def as_recorded(message: Message) -> Document:
    """A request as the recordings write it."""
    document: Document = MessageToDict(message, preserving_proto_field_name=True)
    for variable in document.get("envs", []):
        if "value" in variable:
            variable["value"] = base64.b64decode(variable["value"]).decode()
    return document


def unordered_env(config: Document) -> Document:
    """Sort the variables: the reference sends them in random order."""
    if "envs" not in config:
        return config
    return config | {"envs": sorted(config["envs"], key=lambda variable: str(variable["key"]))}
