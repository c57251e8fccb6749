import base64
import copy
from pathlib import Path
from typing import Any

import pytest

from pykubelet.apiserver.errors import KubeconfigError
from pykubelet.apiserver.rest_config import ExecPlugin, Impersonation, load, parse
from pykubelet.config.documents import read_document
from pykubelet.config.errors import ConfigError

WHERE = Path("/etc/kubernetes/kubelet.conf")
PEM = b"-----BEGIN CERTIFICATE-----\n"
PEM64 = base64.b64encode(PEM).decode()

# What kubeadm writes for a kubelet, before and after it joined.
KUBEADM = f"""
apiVersion: v1
clusters:
- cluster:
    certificate-authority-data: {PEM64}
    server: https://10.0.0.1:6443
  name: default-cluster
contexts:
- context:
    cluster: default-cluster
    namespace: default
    user: default-auth
  name: default-context
current-context: default-context
kind: Config
preferences: {{}}
users:
- name: default-auth
  user:
    client-certificate: /var/lib/kubelet/pki/kubelet-client-current.pem
    client-key: /var/lib/kubelet/pki/kubelet-client-current.pem
"""
BOOTSTRAP = f"""
apiVersion: v1
clusters:
- cluster:
    certificate-authority-data: {PEM64}
    server: https://10.0.0.1:6443
  name: kubernetes
contexts:
- context:
    cluster: kubernetes
    user: tls-bootstrap-token-user
  name: tls-bootstrap-token-user@kubernetes
current-context: tls-bootstrap-token-user@kubernetes
kind: Config
users:
- name: tls-bootstrap-token-user
  user:
    token: abcdef.0123456789abcdef
"""
# What kind writes for its user, with several clusters in one file.
KIND = f"""
apiVersion: v1
kind: Config
clusters:
- cluster:
    certificate-authority-data: {PEM64}
    server: https://127.0.0.1:35093
  name: kind-kind
- cluster:
    server: http://localhost:8080
    extensions: [{{name: minikube.sigs.k8s.io, extension: {{a: 1}}}}]
  name: other
contexts:
- context: {{cluster: kind-kind, user: kind-kind}}
  name: kind-kind
- context: {{cluster: other, user: nobody, namespace: team}}
  name: other
current-context: kind-kind
preferences: {{}}
users:
- name: kind-kind
  user:
    client-certificate-data: {PEM64}
    client-key-data: {PEM64}
- name: nobody
  user: {{}}
"""


def base() -> dict[str, Any]:
    return {
        "kind": "Config",
        "apiVersion": "v1",
        "clusters": [{"name": "c", "cluster": {"server": "https://10.0.0.1:6443"}}],
        "users": [{"name": "u", "user": {"token": "t"}}],
        "contexts": [{"name": "x", "context": {"cluster": "c", "user": "u"}}],
        "current-context": "x",
    }


def with_cluster(**fields: Any) -> dict[str, Any]:
    document = base()
    document["clusters"][0]["cluster"] |= {name.replace("_", "-"): value for name, value in fields.items()}
    return document


def with_user(**fields: Any) -> dict[str, Any]:
    document = base()
    document["users"][0]["user"] = {
        name if name == "tokenFile" else name.rstrip("_").replace("_", "-"): value
        for name, value in fields.items()
    }
    return document


def written(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "kubeconfig"
    path.write_text(text)
    return path


def test_load_kubeadm_kubeconfig_reads_certificate_paths(tmp_path: Path) -> None:
    access = load(written(tmp_path, KUBEADM), read_document)
    assert access.server == "https://10.0.0.1:6443"
    assert access.ca == PEM
    assert access.certificate == access.key == Path("/var/lib/kubelet/pki/kubelet-client-current.pem")
    assert (access.token, access.plugin, access.insecure) == ("", None, False)


def test_load_bootstrap_kubeconfig_reads_token(tmp_path: Path) -> None:
    access = load(written(tmp_path, BOOTSTRAP), read_document)
    assert (access.token, access.certificate) == ("abcdef.0123456789abcdef", None)


def test_load_kind_kubeconfig_selects_context(tmp_path: Path) -> None:
    path = written(tmp_path, KIND)
    assert (load(path, read_document).certificate, load(path, read_document).key) == (PEM, PEM)
    other = load(path, read_document, context="other")
    assert (other.server, other.namespace, other.uses_tls) == ("http://localhost:8080", "team", False)


def test_parse_relative_paths_resolved_against_kubeconfig_directory() -> None:
    document = with_user(client_certificate="pki/../me.crt", client_key="/abs/me.key", tokenFile="token")
    document["clusters"][0]["cluster"]["certificate-authority"] = "../ca.crt"
    access = parse(document, WHERE)
    assert access.certificate == Path("/etc/kubernetes/me.crt")
    assert access.key == Path("/abs/me.key")
    assert access.token_file == Path("/etc/kubernetes/token")
    assert access.ca == Path("/etc/ca.crt")


def test_parse_all_cluster_fields_are_read() -> None:
    access = parse(
        with_cluster(
            server="https://lb.example/k8s/clusters/c-1/?x=1#y",
            tls_server_name="api.test",
            insecure_skip_tls_verify=True,
            proxy_url="http://me:pw@proxy:3128",
            disable_compression=True,
            unheard_of={"of": "anything"},
        ),
        WHERE,
    )
    assert access.server == "https://lb.example/k8s/clusters/c-1"
    assert (access.tls_server_name, access.insecure, access.compression) == ("api.test", True, False)
    assert access.proxy == "http://me:pw@proxy:3128"


def test_parse_impersonation_fields_are_read() -> None:
    document = with_user(
        token="t", as_="jane", as_uid="7", as_groups=["a", "b"], as_user_extra={"reason": ["x", "y"]}
    )
    assert parse(document, WHERE).impersonate == Impersonation(
        "jane", "7", ("a", "b"), {"reason": ("x", "y")}
    )


EXEC = {"apiVersion": "client.authentication.k8s.io/v1", "command": "aws", "interactiveMode": "Never"}


def test_parse_exec_plugin_fields_are_read() -> None:
    document = with_user(
        exec=EXEC
        | {
            "args": ["eks", "get-token"],
            "env": [{"name": "A", "value": "s3cret"}],
            "installHint": "apt install aws",
            "provideClusterInfo": True,
        }
    )
    document["clusters"][0]["cluster"]["extensions"] = [
        {"name": "client.authentication.k8s.io/exec", "extension": {"audience": "x"}}
    ]
    assert parse(document, WHERE).plugin == ExecPlugin(
        "aws",
        "client.authentication.k8s.io/v1",
        ("eks", "get-token"),
        {"A": "s3cret"},
        "apt install aws",
        True,
        {"audience": "x"},
    )


@pytest.mark.parametrize(
    ("command", "expected"),
    [
        ("aws", "aws"),
        ("./aws", "/etc/kubernetes/aws"),
        ("bin/aws", "/etc/kubernetes/bin/aws"),
        ("/x/aws", "/x/aws"),
    ],
)
def test_parse_exec_command_path_resolved_against_kubeconfig_directory(command: str, expected: str) -> None:
    plugin = parse(with_user(exec=EXEC | {"command": command}), WHERE).plugin
    assert plugin is not None
    assert plugin.command == expected


def test_parse_exec_v1beta1_without_interactive_mode_is_accepted() -> None:
    beta = {"apiVersion": "client.authentication.k8s.io/v1beta1", "command": "x", "args": None, "env": None}
    assert parse(with_user(exec=beta), WHERE).plugin is not None


def test_parse_base64_data_with_line_breaks_is_decoded() -> None:
    folded = "\n".join(PEM64[i : i + 10] for i in range(0, len(PEM64), 10)) + "\n"
    assert parse(with_cluster(certificate_authority_data=folded), WHERE).ca == PEM


def test_parse_null_and_unknown_fields_are_ignored() -> None:
    document = base() | {"preferences": None, "extensions": None, "new": [1]}
    document["users"][0]["user"] |= {"exec": None, "as-groups": None, "username": None, "other": 3}
    document["clusters"].append({"name": "empty", "cluster": None})
    document["users"].append({"name": "none"})
    assert parse(document, WHERE).token == "t"


def changed(path: str, value: Any) -> dict[str, Any]:
    document = copy.deepcopy(base())
    *parents, last = path.split(".")
    target: Any = document
    for part in parents:
        target = target[int(part)] if part.isdigit() else target[part]
    target[int(last) if last.isdigit() else last] = value
    return document


@pytest.mark.parametrize(
    ("document", "words"),
    [
        ({}, "has no current-context: set it to one of its contexts (none)"),
        (changed("current-context", ""), "has no current-context: set it to one of its contexts ('x')"),
        (changed("current-context", "y"), "has no context 'y': it has 'x'"),
        (changed("contexts", None), "has no context 'x': it has none"),
        (changed("kind", "Pod"), "is a 'Pod', not a kubeconfig"),
        (changed("contexts.0.context", {"user": "u"}), "context 'x' names no cluster"),
        (changed("contexts.0.context", {"cluster": "c"}), "context 'x' names no user"),
        (changed("contexts.0.context.cluster", "d"), "has no cluster 'd': it has 'c'"),
        (changed("contexts.0.context.user", "v"), "has no user 'v': it has 'u'"),
        (changed("users", base()["users"] * 2), "has several users of the name 'u'"),
        (changed("clusters", "none"), "Expected `array | null`, got `str` - at `clusters`"),
        (changed("users.0.user.token", 5), "got `int` - at `users[0].user.token`"),
        (changed("clusters.0.cluster", {}), "cluster 'c': has no server"),
        (with_cluster(server="10.0.0.1:6443"), "cluster 'c': server '10.0.0.1:6443' is not a URL"),
        (with_cluster(server="ftp://x"), "is not a URL"),
        (with_cluster(server="https://x:99999"), "is not a URL"),
        (with_cluster(server="https://[::1"), "is not a URL"),
        (with_cluster(server="https://me:s3cret@x"), "holds a user name or password"),
        (
            with_cluster(certificate_authority="x", insecure_skip_tls_verify=True),
            "certificate-authority and insecure-skip-tls-verify contradict each other",
        ),
        (
            with_cluster(certificate_authority="x", certificate_authority_data=PEM64),
            "has certificate-authority and certificate-authority-data: keep one",
        ),
        (with_cluster(certificate_authority_data="%%%"), "certificate-authority-data is not base64"),
        (with_cluster(proxy_url="socks4://x:1080"), "proxy-url is not the URL of a proxy"),
        (with_cluster(proxy_url="proxy:3128"), "proxy-url is not the URL of a proxy"),
        (with_cluster(proxy_url="http://x:port"), "proxy-url is not the URL of a proxy"),
        (with_user(client_certificate="x"), "user 'u': has a client-certificate but no key"),
        (with_user(token="s3cret", password="s3cret"), "has a token and a password"),
        (with_user(as_groups=["x"]), "without as: name the user too"),
        (
            with_user(auth_provider={"name": "gcp"}),
            "auth-provider 'gcp' is not supported: use an exec plugin",
        ),
        (with_user(exec=EXEC | {"command": ""}), "exec has no command"),
        (
            with_user(exec=EXEC | {"apiVersion": "client.authentication.k8s.io/v1alpha1"}),
            "exec has apiVersion",
        ),
        (with_user(exec=EXEC | {"interactiveMode": "Always"}), "nobody sits in front of a node agent"),
        (with_user(exec=EXEC | {"interactiveMode": None}), "it must be Never or IfAvailable"),
        (with_user(exec=EXEC | {"env": [{"value": "s3cret"}]}), "a variable without a name"),
        (with_user(client_certificate="a", client_key_data="s3cret!"), "client-key-data is not base64"),
    ],
)
def test_parse_invalid_kubeconfig_raises_error_without_secrets(document: dict[str, Any], words: str) -> None:
    with pytest.raises(KubeconfigError) as caught:
        parse(document, WHERE)
    message = str(caught.value)
    assert message.startswith(f"{WHERE}: ")
    assert words in message
    assert "\n" not in message
    assert "s3cret" not in message


@pytest.mark.parametrize(
    ("text", "words"),
    [("a: [", "neither YAML nor JSON"), ("", "is empty"), ("- 1", "is not a mapping"), ("a: 1\na: 2", "a")],
)
def test_load_malformed_file_raises_config_error(tmp_path: Path, text: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        load(written(tmp_path, text), read_document)


def test_load_missing_file_raises_config_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="does not exist"):
        load(tmp_path / "absent", read_document)


def test_rest_config_repr_hides_secrets() -> None:
    document = with_user(
        token="s3cret", client_certificate_data=PEM64, client_key_data=base64.b64encode(b"s3cret").decode()
    )
    document["clusters"][0]["cluster"]["proxy-url"] = "http://me:s3cret@proxy:3128"
    assert "s3cret" not in repr(parse(document, WHERE))
    basic = with_user(
        username="me", password="s3cret", exec=EXEC | {"env": [{"name": "A", "value": "s3cret"}]}
    )
    assert "s3cret" not in repr(parse(basic, WHERE))
