import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pykubelet.api.pod import (
    ContainerPort,
    ExecAction,
    HTTPGetAction,
    HTTPHeader,
    Lifecycle,
    LifecycleHandler,
    SleepAction,
    TCPSocketAction,
)
from pykubelet.kuberuntime.labels import (
    HASH,
    PORTS,
    PRE_STOP,
    RESTART_COUNT,
    ContainerInfo,
    container_annotations,
    container_labels,
    parse_container,
    parse_sandbox,
    sandbox_annotations,
    sandbox_labels,
)
from tests.support.containers import make_container, make_pod

IDENTITY = {
    "io.kubernetes.pod.name": "web",
    "io.kubernetes.pod.namespace": "shop",
    "io.kubernetes.pod.uid": "u-1",
}


def test_sandbox_labels_include_pod_labels_and_identity() -> None:
    pod = make_pod(labels={"app": "x", "io.kubernetes.pod.name": "liar"}, annotations={"note": "kept"})
    assert sandbox_labels(pod) == IDENTITY | {"app": "x"}
    assert sandbox_annotations(pod) == {"note": "kept"}
    info = parse_sandbox(sandbox_labels(pod), sandbox_annotations(pod))
    assert (info.pod_name, info.pod_namespace, info.pod_uid) == ("web", "shop", "u-1")
    assert info.is_managed
    assert info.labels == {"app": "x"}
    assert info.annotations == {"note": "kept"}


def test_container_annotations_store_all_fields_for_stop() -> None:
    handler = LifecycleHandler(exec=ExecAction(command=["sh", "-c", "echo <bye>"]))
    container = make_container(
        termination_message_path="/dev/termination-log",
        termination_message_policy="File",
        lifecycle=Lifecycle(pre_stop=handler),
        ports=[
            ContainerPort(name="http", container_port=80, host_port=8080, protocol="TCP", host_ip="127.0.0.1")
        ],
    )
    pod = make_pod(container, deletion_grace_period_seconds=3, termination_grace_period_seconds=30)
    labels = container_labels(pod, container)
    annotations = container_annotations(pod, container, 7, {"plugin": "says", HASH: "lies"})
    assert labels == IDENTITY | {"io.kubernetes.container.name": "main"}
    assert annotations == {
        "plugin": "says",
        "io.kubernetes.container.hash": "390e0e43",
        "io.kubernetes.container.restartCount": "7",
        "io.kubernetes.container.terminationMessagePath": "/dev/termination-log",
        "io.kubernetes.container.terminationMessagePolicy": "File",
        "io.kubernetes.pod.deletionGracePeriod": "3",
        "io.kubernetes.pod.terminationGracePeriod": "30",
        "io.kubernetes.container.preStopHandler": (
            '{"exec":{"command":["sh","-c","echo \\u003cbye\\u003e"]}}'
        ),
        "io.kubernetes.container.ports": (
            '[{"name":"http","hostPort":8080,"containerPort":80,"protocol":"TCP","hostIP":"127.0.0.1"}]'
        ),
    }
    assert parse_container(labels, annotations) == ContainerInfo(
        pod_name="web",
        pod_namespace="shop",
        pod_uid="u-1",
        name="main",
        hash="390e0e43",
        restart_count=7,
        termination_message_path="/dev/termination-log",
        termination_message_policy="File",
        deletion_grace=3,
        pod_grace=30,
        pre_stop=handler,
        ports=(container.ports[0],),
    )


def test_container_annotations_unset_fields_omitted() -> None:
    container = make_container()
    assert container_annotations(make_pod(container), container, 0).keys() == {
        "io.kubernetes.container.hash",
        "io.kubernetes.container.restartCount",
        "io.kubernetes.container.terminationMessagePath",
        "io.kubernetes.container.terminationMessagePolicy",
    }


@pytest.mark.parametrize(
    ("handler", "text"),
    [
        (LifecycleHandler(exec=ExecAction()), '{"exec":{}}'),
        (
            LifecycleHandler(http_get=HTTPGetAction(port="http", path="/", scheme="HTTP")),
            '{"httpGet":{"path":"/","port":"http","scheme":"HTTP"}}',
        ),
        (
            LifecycleHandler(
                http_get=HTTPGetAction(port=80, host="h", http_headers=[HTTPHeader(name="X", value="")])
            ),
            '{"httpGet":{"port":80,"host":"h","httpHeaders":[{"name":"X","value":""}]}}',
        ),
        (LifecycleHandler(tcp_socket=TCPSocketAction(port=1)), '{"tcpSocket":{"port":1}}'),
        (
            LifecycleHandler(tcp_socket=TCPSocketAction(port=1, host="h")),
            '{"tcpSocket":{"port":1,"host":"h"}}',
        ),
        (LifecycleHandler(sleep=SleepAction(seconds=0)), '{"sleep":{"seconds":0}}'),
    ],
)
def test_container_annotations_pre_stop_handler_equals_upstream_json(
    handler: LifecycleHandler, text: str
) -> None:
    container = make_container(lifecycle=Lifecycle(pre_stop=handler))
    annotations = container_annotations(make_pod(container), container, 0)
    assert annotations[PRE_STOP] == text
    assert parse_container({}, annotations).pre_stop == handler


@pytest.mark.parametrize(
    ("annotations", "wanted"),
    [
        ({HASH: "0390E0E43"}, {"hash": "390e0e43"}),
        ({HASH: "0"}, {"hash": "0"}),
        ({HASH: "nonsense"}, {"hash": ""}),
        ({RESTART_COUNT: "-3"}, {"restart_count": 0}),
        ({RESTART_COUNT: "٣"}, {"restart_count": 0}),
        ({RESTART_COUNT: "1e9"}, {"restart_count": 0}),
        ({RESTART_COUNT: "9" * 5000}, {"restart_count": 0}),
        ({PORTS: "[{"}, {"ports": ()}),
        ({PORTS: '{"containerPort":80}'}, {"ports": ()}),
        ({PORTS: "null"}, {"ports": ()}),
        ({PRE_STOP: '{"exec":{"command":"sh"}}'}, {"pre_stop": None}),
        ({PRE_STOP: '{"new":' + "[" * 100_000 + "]" * 100_000 + "}"}, {"pre_stop": None}),
        ({PRE_STOP: "\ud800"}, {"pre_stop": None}),
        ({"io.kubernetes.pod.terminationGracePeriod": ""}, {"pod_grace": None}),
    ],
)
def test_parse_container_invalid_annotation_ignored(
    annotations: dict[str, str], wanted: dict[str, object]
) -> None:
    info = parse_container(IDENTITY, annotations)
    assert {name: getattr(info, name) for name in wanted} == wanted


def test_parse_container_foreign_labels_not_managed() -> None:
    assert not parse_sandbox({}, {}).is_managed
    assert not parse_sandbox({"app": "x"}, {}).is_managed
    assert not parse_container({}, {}).is_managed
    assert not parse_container(IDENTITY, {}).is_managed
    assert parse_container(IDENTITY | {"io.kubernetes.container.name": "c"}, {}).is_managed


@given(
    st.builds(
        ContainerPort,
        name=st.text(max_size=5),
        container_port=st.integers(0, 65535),
        host_port=st.integers(0, 65535),
        protocol=st.sampled_from(["TCP", "UDP", "SCTP"]),
        host_ip=st.sampled_from(["", "127.0.0.1", "::1"]),
    )
)
def test_container_annotations_ports_roundtrip(port: ContainerPort) -> None:
    container = make_container(ports=[port])
    annotations = container_annotations(make_pod(container), container, 0)
    assert parse_container({}, annotations).ports == (port,)
    assert json.loads(annotations[PORTS])[0]["containerPort"] == port.container_port


@given(
    st.dictionaries(st.text(), st.text()),
    st.dictionaries(st.sampled_from([HASH, PORTS, PRE_STOP, RESTART_COUNT]), st.text()),
)
def test_parse_container_and_sandbox_any_labels_never_raise(
    labels: dict[str, str], annotations: dict[str, str]
) -> None:
    parse_container(labels, annotations)
    parse_sandbox(labels, annotations)
