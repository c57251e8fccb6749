"""What workloads become, what is ignored with a warning, and what is rejected with a remedy."""

import time
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from pykubelet.config.errors import ConfigError
from pykubelet.podconfig.manifests import MAX_EXPANDED_PODS, read_manifest
from pykubelet.podconfig.workloads.kinds import MAX_PARALLELISM, MAX_REPLICAS, MAX_TEMPLATE_BYTES
from tests.unit.podconfig.workloads.making import (
    Document,
    claim,
    contents,
    cron_job,
    deployment,
    document,
    job,
    problems_of,
    stateful_set,
    template,
    workload,
)


def test_deployment_replicas_have_stable_names_labels_and_owner() -> None:
    pods = contents(deployment(replicas=3)).pods
    assert [pod.full_name for pod in pods] == ["default/web-n1", "default/web-1-n1", "default/web-2-n1"]
    assert len({pod.uid for pod in pods}) == 3
    (owner,) = pods[0].metadata.owner_references
    assert (owner.kind, owner.name, owner.controller) == ("Deployment", "web", True)
    assert pods[0].metadata.labels["app"] == "web"
    assert pods[0].metadata.labels["pod-template-hash"]
    scaled = contents(deployment(replicas=1)).pods
    assert scaled == pods[:1], "scaling does not change the pods that stay"
    changed = contents(deployment(template=template(hostname="other"))).pods
    assert changed[0].uid != pods[0].uid
    assert changed[0].full_name == pods[0].full_name


def test_daemon_set_and_scaled_to_zero_have_one_and_no_pod() -> None:
    assert [
        pod.metadata.name for pod in contents(document("DaemonSet", "log", template=template())).pods
    ] == ["log-n1"]
    assert contents(deployment(replicas=0)).pods == []


def test_stateful_set_claim_templates_become_claims_and_volumes() -> None:
    written = stateful_set(
        volumeClaimTemplates=[{"metadata": {"name": "data"}, "spec": {"accessModes": ["ReadWriteOnce"]}}],
        template=template(volumes=[{"name": "data", "emptyDir": {}}, {"name": "tmp", "emptyDir": {}}]),
    )
    found = contents(written)
    (pod,) = found.pods
    assert (pod.metadata.name, pod.spec.hostname) == ("db-0-n1", "db-0")
    assert pod.metadata.labels["statefulset.kubernetes.io/pod-name"] == "db-0"
    volumes = {volume.name: volume.persistent_volume_claim for volume in pod.spec.volumes}
    assert volumes["data"] is not None
    assert volumes["data"].claim_name == "data-db-0"
    assert volumes["tmp"] is None
    assert [found.metadata.name for found in found.all_objects] == ["data-db-0"]
    assert contents({**written, "spec": {**written["spec"], "ordinals": {"start": 4}}}).pods[
        0
    ].metadata.name == ("db-4-n1")


def test_claims_and_jobs_become_objects_and_no_static_pods() -> None:
    found = contents(claim(), job(), cron_job())
    assert (list(found.pods), [item.title for item in found.workloads]) == (
        [],
        ["persistentVolumeClaim default/data", "job default/once", "cronJob default/nightly"],
    )
    assert len(found.all_objects) == 1


def test_list_with_workloads_is_read_like_kubectl_get_output() -> None:
    found = contents({"apiVersion": "v1", "kind": "List", "items": [deployment(), job()]})
    assert [item.kind for item in found.workloads] == ["Deployment", "Job"]


REJECTED: list[tuple[Document, str]] = [
    (deployment(replicas=MAX_REPLICAS + 1), "spec.replicas: is 17, but a standalone node runs at most 16"),
    (deployment(replicas=10**12), "spec.replicas"),
    (deployment(replicas=-1), "spec.replicas"),
    (deployment(replicas="3"), "spec.replicas: expected `int | null`, got `str`"),
    (deployment(template=template("Never")), "spec.template.spec.restartPolicy: is Never"),
    (deployment(selector={"matchLabels": {"app": "x"}}), "spec.selector.matchLabels.app: does not match"),
    (deployment(template={}), "spec.template.spec.containers: must have at least one container"),
    (
        deployment(template=template(containers=[{"name": "B", "image": "x"}])),
        "spec.template.spec.containers[0].name",
    ),
    (
        deployment(
            replicas=2,
            template=template(
                containers=[{"name": "a", "image": "x", "ports": [{"containerPort": 80, "hostPort": 8080}]}]
            ),
        ),
        "only one pod of a node can have port 8080 of the host",
    ),
    (
        deployment(
            replicas=2,
            template=template(
                hostNetwork=True, containers=[{"name": "a", "image": "x", "ports": [{"containerPort": 80}]}]
            ),
        ),
        "only one pod of a node can have port 80 of the host",
    ),
    (stateful_set(replicas=3), "spec.replicas: is 3, but a standalone node runs one pod of a StatefulSet"),
    (
        stateful_set(
            volumeClaimTemplates=[{"metadata": {"name": "../x"}}]
        ),
        "spec.volumeClaimTemplates[0].metadata.name",
    ),
    (job(restart=""), "spec.template.spec.restartPolicy: must be OnFailure or Never"),
    (job(restart="Always"), "spec.template.spec.restartPolicy: must be OnFailure or Never"),
    (job(parallelism=MAX_PARALLELISM + 1), "spec.parallelism: is 17, but must be from 0 to 16"),
    (job(completions=10**9), "spec.completions"),
    (job(completionMode="Indexed"), "spec.completions: must be set with completionMode Indexed"),
    (job(completionMode="Indexed", completions=5000), "spec.completions: is 5000"),
    (job(backoffLimit=-1), "spec.backoffLimit"),
    (job(podFailurePolicy={"rules": []}), "spec.podFailurePolicy: a standalone node cannot do that"),
    (job(name="x" * 64), "metadata.name: is 64 characters long"),
    (
        job(
            template=template("Never", containers=[{"name": "a", "args": ["y" * MAX_TEMPLATE_BYTES]}])
        ),
        "move data to a ConfigMap",
    ),
    (cron_job(schedule="nonsense"), "spec.schedule: 'nonsense' has 1 fields"),
    (cron_job(timeZone="Mars/Olympus"), "spec.timeZone: 'Mars/Olympus' is not known"),
    (cron_job(concurrencyPolicy="Sometimes"), "spec.concurrencyPolicy"),
    (cron_job(name="x" * 53), "metadata.name: is 53 characters long"),
    (
        document("CronJob", schedule="* * * * *", jobTemplate={"spec": {"template": template("Always")}}),
        "spec.jobTemplate.spec.template.spec.restartPolicy",
    ),
    (
        document(
            "CronJob",
            schedule="* * * * *",
            jobTemplate={"spec": {"template": template("Never", containers=[])}},
        ),
        "spec.jobTemplate.spec.template.spec.containers: must have at least one",
    ),
    (claim(volumeMode="Block"), "spec.volumeMode: is Block"),
    (claim(volumeName="pv1"), "spec.volumeName: a standalone node has no PersistentVolumes"),
    (claim(accessModes=["Everything"]), "spec.accessModes[0]"),
    (claim(name="../../etc"), "metadata.name"),
    ({"apiVersion": "v1", "kind": "Service", "metadata": {"name": "s"}}, "publish ports with hostPort"),
    ({"apiVersion": "apps/v1", "kind": "ReplicaSet"}, "write a Deployment"),
    ({"apiVersion": "v1", "kind": "Deployment", "metadata": {}}, "write apiVersion: apps/v1"),
    ({"apiVersion": "example.org/v1", "kind": "Thing"}, "is a 'Thing' of 'example.org/v1'"),
    (
        deployment(template=template(serviceAccountName="x")),
        "spec.template.spec.serviceAccountName: refers to",
    ),
    (
        deployment(template={**template(), "metadata": {"annotations": {"pykubelet.dev/wait-for": "web"}}}),
        "spec.template.metadata.annotations[pykubelet.dev/wait-for]: names the pod itself",
    ),
]  # fmt: skip


@pytest.mark.parametrize(("written", "message"), REJECTED, ids=[message[:60] for _, message in REJECTED])
def test_read_what_cannot_work_is_rejected_with_path_and_remedy(written: Document, message: str) -> None:
    found = problems_of(written)
    assert any(message in problem for problem in found), found


@pytest.mark.parametrize("kind", ["Deployment", "DaemonSet", "StatefulSet", "Job", "CronJob"])
def test_read_on_cluster_node_workloads_are_rejected_as_before(kind: str) -> None:
    (problem,) = problems_of(document(kind, template=template()), standalone=False)
    assert "write a Pod of apiVersion: v1" in problem
    (problem,) = problems_of(claim(), standalone=False)
    assert problem == "is a 'PersistentVolumeClaim': only Pod and PodList can be run"


def test_read_ignored_fields_are_warnings_with_path() -> None:
    def warnings(written: Document) -> list[str]:
        return [str(warning) for warning in workload(written).warnings]

    assert warnings(deployment(strategy={"type": "Recreate"}, revisionHistoryLimit=0)) == []
    assert warnings(deployment(strategy={"type": "RollingUpdate"})) == [
        "spec.strategy: is ignored: a changed pod is stopped before its successor starts"
    ]
    assert warnings(deployment(replica=3)) == ["spec.replica: is ignored: this kind has no such field"]
    assert "spec.serviceName" in warnings(stateful_set(serviceName="db"))[0]
    assert (
        "spec.jobTemplate.spec.podReplacementPolicy"
        in warnings(
            document(
                "CronJob",
                schedule="* * * * *",
                jobTemplate={"spec": {**job()["spec"], "podReplacementPolicy": "Failed"}},
            )
        )[0]
    )
    assert warnings(claim(resources={"requests": {"storage": "1Gi"}})) == [
        "spec.resources: is not enforced: the volume is a directory of this node"
    ]


def test_read_too_many_pods_in_one_file_is_rejected() -> None:
    many = [deployment(f"d{index}", replicas=16) for index in range(MAX_EXPANDED_PODS // 16 + 1)]
    assert problems_of(*many) == ["its workloads have more than 1000 pods: write fewer replicas"]


def test_read_ten_thousand_documents_takes_bounded_time() -> None:
    text = "".join(
        f"---\napiVersion: batch/v1\nkind: Job\nmetadata: {{name: j{index}}}\nspec: {{template: {{spec: "
        f"{{restartPolicy: Never, containers: [{{name: a, image: x}}]}}}}}}\n"
        for index in range(10_000)
    )
    started = time.process_time()
    assert len(read_manifest(text.encode(), "here").workloads) == 10_000
    assert time.process_time() - started < 30


def test_read_deep_nesting_is_a_problem_and_not_a_crash() -> None:
    data = b"apiVersion: apps/v1\nkind: Deployment\nspec: " + b"{a: " * 5000 + b"1" + b"}" * 5000
    with pytest.raises(ConfigError):
        read_manifest(data, "here")


values = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), st.text(max_size=5), st.floats(allow_nan=False)),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3), st.dictionaries(st.text(max_size=5), inner, max_size=3)
    ),
    max_leaves=8,
)
fields = st.sampled_from(
    (
        *("replicas", "selector", "template", "strategy", "parallelism", "completions", "completionMode"),
        *("schedule", "jobTemplate", "suspend", "volumeClaimTemplates", "ordinals", "accessModes"),
        *("resources", "serviceName", "timeZone"),
    )
)


@given(
    st.sampled_from(["Deployment", "DaemonSet", "StatefulSet", "Job", "CronJob", "PersistentVolumeClaim"]),
    st.dictionaries(fields, values, max_size=6),
    values,
)
def test_read_any_document_is_accepted_or_a_config_error(kind: str, spec: dict[str, Any], meta: Any) -> None:
    written = document(kind, **spec)
    for changed in (written, {**written, "metadata": meta}, {**written, "spec": meta}):
        problems_of(changed)


@given(st.integers(0, MAX_REPLICAS), st.text("abc", min_size=1, max_size=5))
def test_expansion_same_document_has_same_pods(replicas: int, name: str) -> None:
    first, second = (contents(deployment(name, replicas=replicas)).pods for _ in range(2))
    assert first == second
    assert len({pod.metadata.name for pod in first}) == len({pod.uid for pod in first}) == replicas


EXAMPLES = Path(__file__).parents[4] / "examples" / "workloads"


@pytest.mark.parametrize("file", sorted(EXAMPLES.iterdir()), ids=lambda file: file.stem)
def test_example_is_valid_and_begins_with_its_command(file: Path) -> None:
    data = file.read_bytes()
    assert contents(*yaml.safe_load_all(data)).written_pods or "job" in file.name
    assert data.startswith(b"# ")
    assert b"pykubelet apply examples/workloads/" in data
