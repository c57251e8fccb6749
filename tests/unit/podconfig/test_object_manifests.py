"""ConfigMaps and Secrets as people write them: what they hold, what is refused, and that nothing is shown."""

import base64
import json
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from pykubelet.api.core import ConfigMap, Secret
from pykubelet.config.errors import ConfigError
from pykubelet.podconfig.local_objects import MAX_DATA_BYTES, title
from pykubelet.podconfig.manifests import Contents, read_manifest
from tests.unit.podconfig.making import manifest

HIDDEN = "hunter2-is-not-to-be-seen"


def b64(data: bytes) -> str:
    return base64.b64encode(data).decode()


def document(kind: str = "ConfigMap", name: str = "c", **fields: Any) -> dict[str, Any]:
    return {"apiVersion": "v1", "kind": kind, "metadata": {"name": name}, **fields}


def read(*documents: dict[str, Any]) -> Contents:
    return read_manifest(yaml.safe_dump_all(documents).encode(), "here")


def one(**fields: Any) -> ConfigMap | Secret:
    (found,) = read(document(**fields)).objects
    assert isinstance(found, ConfigMap | Secret)
    return found


def refusals(*documents: dict[str, Any]) -> list[str]:
    with pytest.raises(ConfigError) as err:
        read(*documents)
    return [str(problem) for problem in err.value.problems]


def test_read_manifest_config_map_data_and_binary_data_are_decoded() -> None:
    found = one(
        data={"a": "1", "b": None, "c.conf": "x\ny\n"}, binaryData={"z": b64(b"\0\xff")}, immutable=True
    )
    assert isinstance(found, ConfigMap)
    assert (found.metadata.namespace, found.metadata.name) == ("default", "c")
    assert found.data == {"a": "1", "b": "", "c.conf": "x\ny\n"}
    assert found.binary_data == {"z": b"\0\xff"}
    assert found.immutable is True
    assert title(found) == "configMap default/c"


def test_read_manifest_secret_string_data_overrides_base64_data() -> None:
    folded = "\n".join(b64(bytes(range(100)))[n : n + 20] for n in range(0, 140, 20))
    found = one(kind="Secret", data={"a": b64(b"old"), "b": folded}, stringData={"a": "new ä"})
    assert isinstance(found, Secret)
    assert found.data == {"a": "new ä".encode(), "b": bytes(range(100))}
    assert found.type == "Opaque"
    assert title(found) == "secret default/c"
    assert "new" not in repr(found)


def test_read_manifest_finds_objects_among_pods_in_documents_and_lists() -> None:
    listed = {"apiVersion": "v1", "kind": "List", "items": [document("Secret", "s"), document(name="c")]}
    text = yaml.safe_dump_all([listed, document(name="d")]) + "---\n" + manifest("web")
    found = read_manifest(text.encode(), "here")
    assert [pod.metadata.name for pod in found.pods] == ["web"]
    assert [title(item) for item in found.objects] == [
        "secret default/s",
        "configMap default/c",
        "configMap default/d",
    ]
    assert found.has_secret
    left_out = read_manifest(text.encode(), "here", objects=False)
    assert (left_out.objects, left_out.unused) == ([], ["Secret", "ConfigMap", "ConfigMap"])
    assert left_out.has_secret
    assert not read(document()).has_secret


@pytest.mark.parametrize(
    ("bad", "says"),
    [
        (document(data={"port": 8080}), "here: ConfigMap 'c': data.port: must be text: put it in quotes"),
        (document(data={"on": True}), "data.on: must be text: put it in quotes"),
        (document(data={"a": {"b": "c"}}), "data.a: must be text"),
        (document(data=["a"]), "ConfigMap 'c': data: expected"),
        (document(data={"a b": "x"}), "data[a b]: 'a b' must be 1 to 253 letters"),
        (document(data={"..": "x"}), "not begin with '..'"),
        (document(data={"../../etc/passwd": "x"}), "must be 1 to 253 letters"),
        (document(binaryData={"a": "!"}), "binaryData.a: is not base64: plain text belongs under data"),
        (document(data={"a": "x"}, binaryData={"a": ""}), "binaryData.a: is in data, too"),
        (document(data={"a": "x" * (MAX_DATA_BYTES + 1)}), "data: holds more than 1 MiB: split it"),
        (document(immutable="yes"), "ConfigMap 'c': immutable: expected"),
        (document(name="Bad_Name"), "metadata.name: 'Bad_Name' must be at most 253"),
        (document(metadata={}), "here: ConfigMap: metadata.name: must be set"),
        (document(metadata={"name": "c", "namespace": "a.b"}), "metadata.namespace: 'a.b' must be 1 to 63"),
        (document(metadata=[]), "ConfigMap: metadata: expected"),
        (
            document("Secret", data={"a": HIDDEN}),
            "data.a: is not base64: plain text belongs under stringData",
        ),
        (document("Secret", data={"a": "ä" + HIDDEN}), "data.a: is not base64"),
        (document("Secret", stringData={"a": [HIDDEN]}), "stringData.a: must be text"),
        (document("Secret", type=[HIDDEN]), "Secret 'c': type: expected"),
        (
            document("Secret", stringData={"a": HIDDEN}, type="kubernetes.io/tls"),
            "data[tls.crt]: must be set",
        ),
        (document("Secret", type="kubernetes.io/ssh-auth"), "data.ssh-privatekey: must be set"),
        (document("Secret", type="kubernetes.io/basic-auth"), "data: must have a username or a password"),
        (
            document(
                "Secret", type="kubernetes.io/dockerconfigjson", stringData={".dockerconfigjson": HIDDEN}
            ),
            "data[.dockerconfigjson]: must be a JSON object",
        ),
        (document("Secret", type="kubernetes.io/dockercfg"), "data[.dockercfg]: must be set in a secret of"),
    ],
)
def test_read_manifest_invalid_object_raises_error_without_secret_data(
    bad: dict[str, Any], says: str
) -> None:
    told = refusals(bad)
    assert any(says in line for line in told), told
    assert all(HIDDEN not in line and "\n" not in line for line in told)


def test_read_manifest_several_problems_are_all_reported() -> None:
    told = refusals(document(name="a", data={"x": 1, "y": 2}), document("Secret", "b", data={"z": "?"}))
    assert [line.split(":")[1].strip() for line in told] == ["ConfigMap 'a'", "ConfigMap 'a'", "Secret 'b'"]


@pytest.mark.parametrize(
    "value", [f"*{HIDDEN}", f"&{HIDDEN} [", f"!{HIDDEN} [", f"{{{HIDDEN}", f'"{HIDDEN}\\q"']
)
def test_read_manifest_yaml_error_does_not_show_secret_data(value: str) -> None:
    text = f"apiVersion: v1\nkind: Secret\nmetadata: {{name: s}}\nstringData:\n  password: {value}\n"
    with pytest.raises(ConfigError) as err:
        read_manifest(text.encode(), "here")
    assert HIDDEN not in str(err.value)


def test_read_manifest_lone_surrogate_raises_config_error() -> None:
    data = json.dumps(document(data={"a": "\ud800"})).encode()
    with pytest.raises(ConfigError):
        read_manifest(data, "here")


@pytest.mark.parametrize(
    "fields",
    [
        {"type": "kubernetes.io/tls", "stringData": {"tls.crt": "c", "tls.key": "k"}},
        {"type": "kubernetes.io/dockerconfigjson", "stringData": {".dockerconfigjson": '{"auths": {}}'}},
        {"type": "kubernetes.io/basic-auth", "stringData": {"username": "u"}},
        {"type": "example.com/own"},
    ],
)
def test_read_manifest_valid_typed_secret_is_accepted(fields: dict[str, Any]) -> None:
    assert isinstance(one(kind="Secret", **fields), Secret)


values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=8,
)


@given(
    st.sampled_from(["ConfigMap", "Secret"]),
    st.dictionaries(
        st.sampled_from(["metadata", "data", "stringData", "binaryData", "type", "immutable", "other"]),
        values,
    ),
)
def test_read_manifest_any_object_fields_raise_only_config_error(kind: str, fields: dict[str, Any]) -> None:
    data = json.dumps({"apiVersion": "v1", "kind": kind, **fields}).encode()
    try:
        (found,) = read_manifest(data, "here").objects
    except ConfigError:
        return
    assert found.metadata.name


@given(st.dictionaries(st.from_regex(r"[a-z]{2,5}\.x", fullmatch=True), st.binary(max_size=50), max_size=4))
def test_read_manifest_binary_data_round_trips(data: dict[str, bytes]) -> None:
    encoded = {key: b64(value) for key, value in data.items()}
    assert one(kind="Secret", data=encoded).data == data
    found = one(kind="ConfigMap", binaryData=encoded)
    assert isinstance(found, ConfigMap)
    assert found.binary_data == data
