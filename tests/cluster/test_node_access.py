"""Who gets what from a node, asked directly, with the real API server's word on everybody.

`tests/unit/server` has every endpoint with scripted answers; this shows that the real answers fit.
"""

import base64
import http.client
import ssl
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import pytest
import yaml

from tests.cluster.conftest import fresh_namespace
from tests.cluster.kubectl_program import Kubectl
from tests.support.certs import Authority
from tests.support.cluster_node import ClusterNode
from tests.support.plane import Document, Plane, unique

pytestmark = pytest.mark.machine

Ask = Callable[[str, str], tuple[int, str]]

READS = ("/pods", "/healthz", "/configz", "/metrics", "/logs/", "/runningpods/", "/none")
FORBIDDEN = dict.fromkeys(READS, 403) | {"/exec": 403, "/run": 403}
UNKNOWN = dict.fromkeys(FORBIDDEN, 401)
EVERYTHING = dict.fromkeys(READS, 200) | {"/none": 404, "/exec": 404, "/run": 404}


def reachable(*allowed: str) -> dict[str, int]:
    """What one may read who has only these."""
    return FORBIDDEN | dict.fromkeys(allowed, 200)


EXPECTED: Mapping[str, Mapping[str, int]] = {
    "no credentials": UNKNOWN,
    "a certificate of strangers": UNKNOWN,
    "a token that is none": UNKNOWN,
    "a user without permission": FORBIDDEN,
    "another node": FORBIDDEN,
    "a service account without permission": FORBIDDEN,
    "a user who may read pods": reachable("/pods", "/runningpods/"),
    "a user who may read metrics": reachable("/metrics"),
    "a user who may read the proxy": reachable("/pods", "/runningpods/", "/healthz", "/configz")
    | {"/none": 404},
    "a service account who may read health": reachable("/healthz"),
    "the API server": EVERYTHING,
    "an admin": EVERYTHING,
}
_METHODS = {"/exec": "POST", "/run": "POST"}
_PLACES = {
    "/exec": "/exec/default/none/main?command=true&output=1",
    "/run": "/run/default/none/main?cmd=true",
}


class Asker:
    """Makes people of the cluster, who ask the node."""

    def __init__(self, node: ClusterNode, namespace: str, folder: Path) -> None:
        self._node = node
        self._plane = node.plane
        self._namespace = namespace
        self._folder = folder
        self._roles: list[str] = []
        found = node.node_object()
        assert found is not None
        self._port: int = found["status"]["daemonEndpoints"]["kubeletEndpoint"]["Port"]

    def who(self, name: str) -> Ask:
        """Give a person's way of asking."""
        layout = self._plane.cluster.layout
        user = unique("user")
        match name:
            case "no credentials":
                return self._by()
            case "a certificate of strangers":
                stranger = Authority(self._folder, "strangers").sign("/O=system:masters/CN=kubernetes-admin")
                return self._by(pair=(stranger.certificate, stranger.key))
            case "a token that is none":
                return self._by(token="nonsense")
            case "a user without permission":
                return self._by_certificate(user)
            case "another node":
                return self._by_certificate("system:node:other", "system:nodes")
            case "a service account without permission":
                return self._by(token=self._token(user))
            case "a service account who may read health":
                token = self._token(user)
                self._allow(f"system:serviceaccount:{self._namespace}:{user}", "healthz")
                return self._by(token=token)
            case "the API server":
                file = "apiserver-kubelet-client"
                return self._by(pair=(layout.certificate(file), layout.key(file)))
            case "an admin":
                return self._by(pair=(layout.certificate("admin"), layout.key("admin")))
        self._allow(user, name.rpartition(" ")[2])
        return self._by_certificate(user)

    def forget(self) -> None:
        """Take away what was allowed."""
        for name in self._roles:
            self._plane.delete("clusterrolebinding", name)
            self._plane.delete("clusterrole", name)

    def _allow(self, user: str, subresource: str) -> None:
        group = "rbac.authorization.k8s.io"
        name = unique("role")
        self._roles.append(name)
        role: Document = {"apiVersion": f"{group}/v1", "metadata": {"name": name}}
        rule = {"apiGroups": [""], "resources": [f"nodes/{subresource}"], "verbs": ["get"]}
        self._plane.create({**role, "kind": "ClusterRole", "rules": [rule]})
        bound = {"kind": "ClusterRole", "name": name, "apiGroup": group}
        subject = {"kind": "User", "name": user, "apiGroup": group}
        self._plane.create({**role, "kind": "ClusterRoleBinding", "roleRef": bound, "subjects": [subject]})
        # The API server's authorizer hears of it a moment later, and the node remembers a refusal.
        wish = {"verb": "get", "version": "v1", "resource": "nodes", "subresource": subresource}
        review = {
            "apiVersion": "authorization.k8s.io/v1",
            "kind": "SubjectAccessReview",
            "spec": {"user": user, "resourceAttributes": wish},
        }
        place = "/apis/authorization.k8s.io/v1/subjectaccessreviews"
        self._plane.wait(
            "the permission to count", lambda: self._plane.request("POST", place, review)["status"]["allowed"]
        )

    def _token(self, account: str) -> str:
        place = self._plane.place("serviceaccount", self._namespace)
        meta = {"name": account, "namespace": self._namespace}
        self._plane.create({"apiVersion": "v1", "kind": "ServiceAccount", "metadata": meta})
        asked = {"apiVersion": "authentication.k8s.io/v1", "kind": "TokenRequest", "spec": {}}
        made = self._plane.request("POST", f"{place}/{account}/token", asked)
        return str(made["status"]["token"])

    def _by_certificate(self, user: str, *groups: str) -> Ask:
        written = yaml.safe_load(self._plane.user_kubeconfig(user, *groups).read_text())["users"][0]["user"]
        paths = []
        for kind in ("certificate", "key"):
            path = self._folder / unique(kind)
            path.write_bytes(base64.b64decode(written[f"client-{kind}-data"]))
            paths.append(path)
        return self._by(pair=(paths[0], paths[1]))

    def _by(self, *, pair: tuple[Path, Path] | None = None, token: str = "") -> Ask:
        # The node's certificate is its own; who the node is, is not the question here.
        context = ssl._create_unverified_context()
        if pair is not None:
            context.load_cert_chain(*pair)
        headers = {"Authorization": f"Bearer {token}"} if token else {}

        def ask(method: str, path: str) -> tuple[int, str]:
            connection = http.client.HTTPSConnection("127.0.0.1", self._port, context=context, timeout=60)
            try:
                connection.request(method, path, headers=headers)
                answer = connection.getresponse()
                return answer.status, answer.read().decode(errors="replace")
            finally:
                connection.close()

        return ask


@pytest.fixture(scope="module")
def people(
    cluster_member: ClusterNode, plane: Plane, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Asker]:
    with fresh_namespace(plane) as namespace:
        asker = Asker(cluster_member, namespace, tmp_path_factory.mktemp("people"))
        try:
            yield asker
        finally:
            asker.forget()


@pytest.mark.parametrize("person", EXPECTED)
def test_kubelet_server_authorization_status_by_user_and_path(people: Asker, person: str) -> None:
    ask = people.who(person)
    got = {path: ask(_METHODS.get(path, "GET"), _PLACES.get(path, path))[0] for path in EXPECTED[person]}
    assert got == EXPECTED[person]


def test_kubelet_server_denied_request_names_missing_permission(people: Asker) -> None:
    ask = people.who("a user without permission")
    status, text = ask("GET", "/pods")
    assert status == 403
    assert "verb=get, resource=nodes, subresource(s)=[pods proxy]" in text
    assert people.who("no credentials")("GET", "/pods") == (401, "Unauthorized")


def test_kubelet_server_node_proxy_user_without_permission_forbidden(
    plane: Plane, cluster_member: ClusterNode
) -> None:
    stranger = Kubectl(plane, kubeconfig=plane.user_kubeconfig(unique("user")))
    said = stranger.run("get", "--raw", f"/api/v1/nodes/{cluster_member.name}/proxy/pods")
    assert said.code == 1
    assert "Forbidden" in said.err
