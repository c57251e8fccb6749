"""`apply`, `get`, `rm`, `stop` and `start` on a manifest directory without a running node."""

import io
import json
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from socketserver import BaseRequestHandler, ThreadingTCPServer
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from pykubelet.api.meta import from_document
from pykubelet.api.pod import Pod
from pykubelet.cli.manifests.apply import plan_apply, run_apply
from pykubelet.cli.manifests.change import run_remove, run_start, run_stop
from pykubelet.cli.manifests.get import pods_of, run_get
from pykubelet.cli.manifests.inventory import ManifestError, ManifestFile, ManifestObject, read_directory
from pykubelet.cli.manifests.run import RunOptions, run_manifest
from pykubelet.cli.node import up
from pykubelet.cli.node_access import Node
from pykubelet.cli.options import NodeSelection
from pykubelet.podconfig.manifests import MAX_BYTES
from pykubelet.server.node_info import NodeInfo, write_node_info
from pykubelet.standalone.instance import Instance
from tests.unit.podconfig.making import document as pod_document
from tests.unit.podconfig.workloads.making import (
    Document,
    claim,
    cron_job,
    deployment,
    job,
    stateful_set,
    template,
)

CONFIG: Document = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "conf"}, "data": {"a": "1"}}
SECRET: Document = {
    "apiVersion": "v1",
    "kind": "Secret",
    "metadata": {"name": "s"},
    "stringData": {"k": "hunter2"},
}


class Cli:
    """The commands on one data directory."""

    def __init__(self, data_dir: Path, files: Path, capsys: pytest.CaptureFixture[str]) -> None:
        self.instance = Instance.at(data_dir)
        self.instance.manifests.mkdir(parents=True)
        self.manifests = self.instance.manifests
        self.files = files
        self._capsys = capsys
        self.selection = NodeSelection(data_dir=data_dir)

    def file(self, name: str, *documents: Document) -> str:
        path = self.files / name
        path.write_text(yaml.safe_dump_all(documents))
        return str(path)

    def _run(self, work: Callable[[], int]) -> tuple[int, list[str], str]:
        self._capsys.readouterr()
        code = work()
        captured = self._capsys.readouterr()
        return code, captured.out.splitlines(), captured.err

    def apply(self, *sources: str, prune: bool = False) -> tuple[int, list[str], str]:
        return self._run(lambda: run_apply(self.selection, sources, prune=prune))

    def get(
        self, kind: str | None = None, name: str | None = None, output: Any = "table"
    ) -> tuple[int, list[str], str]:
        return self._run(lambda: run_get(self.selection, kind, name, output))

    def rm(self, *names: str, volumes: bool = False) -> tuple[int, list[str], str]:
        return self._run(lambda: run_remove(self.selection, names, volumes=volumes))

    def stop(self, *names: str) -> tuple[int, list[str], str]:
        return self._run(lambda: run_stop(self.selection, names))

    def start(self, *names: str) -> tuple[int, list[str], str]:
        return self._run(lambda: run_start(self.selection, names))

    @property
    def present(self) -> list[str]:
        return sorted(path.name for path in self.manifests.iterdir())


@pytest.fixture
def cli(data_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Cli:
    return Cli(data_dir, tmp_path, capsys)


def test_apply_new_changed_and_same_objects_reports_each(cli: Cli) -> None:
    code, out, err = cli.apply(cli.file("app.yaml", deployment(), CONFIG))
    assert (code, out) == (0, ["deployment/web created", "configmap/conf created"])
    assert "The node is not running: start it with `pykubelet up" in err
    before = (cli.manifests / "app.yaml").stat().st_mtime_ns
    assert cli.apply(cli.file("app.yaml", deployment(), CONFIG))[1] == [
        "deployment/web unchanged",
        "configmap/conf unchanged",
    ]
    assert (cli.manifests / "app.yaml").stat().st_mtime_ns == before, "not written"
    changed = {**CONFIG, "data": {"a": "2"}}
    assert cli.apply(cli.file("app.yaml", deployment(), changed, job()))[1] == [
        "deployment/web unchanged",
        "configmap/conf configured",
        "job/once created",
    ]


def test_apply_secret_is_readable_by_its_owner_only(cli: Cli) -> None:
    cli.apply(cli.file("s.yaml", SECRET))
    assert (cli.manifests / "s.yaml").stat().st_mode & 0o777 == 0o600


def test_apply_objects_of_another_file_keep_their_file_name(cli: Cli) -> None:
    cli.apply(cli.file("first.yaml", deployment()))
    assert cli.apply(cli.file("second.yaml", deployment(replicas=2)))[1] == ["deployment/web configured"]
    assert cli.present == ["first.yaml"]


def test_apply_invalid_file_changes_nothing_and_lists_all_problems(cli: Cli) -> None:
    good, bad = (
        cli.file("a.yaml", deployment("good")),
        cli.file("b.yaml", deployment(replicas=99), job(restart="")),
    )
    code, out, err = cli.apply(good, bad)
    assert (code, out, cli.present) == (1, [], [])
    assert "spec.replicas: is 99" in err
    assert "spec.template.spec.restartPolicy: must be OnFailure or Never" in err


def test_apply_conflicts_name_the_other_file_and_change_nothing(cli: Cli) -> None:
    cli.apply(cli.file("both.yaml", deployment(), CONFIG))
    code, _, err = cli.apply(cli.file("one.yaml", deployment(replicas=2)))
    assert code == 1
    assert (
        f"deployment default/web is in {cli.manifests}/both.yaml together with configMap default/conf" in err
    )
    code, _, err = cli.apply(cli.file("pod.yaml", pod_document("web")))
    assert code == 1
    assert "deployment default/web in both.yaml and pod default/web in pod.yaml would both run pod" in err
    code, _, err = cli.apply(cli.file("both.yaml", job()))
    assert "both.yaml is there already and holds deployment default/web" in err
    assert cli.present == ["both.yaml"]


def test_apply_removed_object_needs_prune(cli: Cli) -> None:
    cli.apply(cli.file("app.yaml", deployment(), CONFIG))
    smaller = cli.file("app.yaml", deployment())
    code, _, err = cli.apply(smaller)
    assert code == 1
    assert "say --prune to remove what yours does not have" in err
    assert cli.apply(smaller, prune=True)[1] == ["deployment/web unchanged", "configmap/conf pruned"]
    assert cli.get("cm")[1] == []


def test_apply_directory_applies_all_or_nothing(cli: Cli) -> None:
    folder = cli.files / "d"
    folder.mkdir()
    (folder / "a.yaml").write_text(yaml.safe_dump(deployment("a")))
    (folder / "b.json").write_text(json.dumps(job("b")))
    (folder / "README").write_text("no manifest")
    assert cli.apply(str(folder))[1] == ["deployment/a created", "job/b created"]
    assert cli.present == ["a.yaml", "b.json"]
    (folder / "c.yaml").write_text(yaml.safe_dump(deployment("a")))
    assert "deployment default/a is in a.yaml and in c.yaml" in cli.apply(str(folder))[2]
    empty = cli.files / "empty"
    empty.mkdir()
    assert "has no manifests: their names end with .yaml" in cli.apply(str(empty))[2]


def test_apply_standard_input_is_named_after_its_first_object(
    cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    def give(text: str) -> None:
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(text.encode())))

    give(yaml.safe_dump(job()))
    assert cli.apply("-")[1] == ["job/once created"]
    assert cli.present == ["job-once.yaml"]
    give("x" * (MAX_BYTES + 1))
    assert "is larger than 10 MiB" in cli.apply("-")[2]


def test_apply_url_is_fetched_and_errors_name_it(cli: Cli) -> None:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            if self.path.startswith("/none"):
                self.send_error(404)
                return
            self.send_response(200)
            self.end_headers()
            self.wfile.write(
                yaml.safe_dump(job()).encode() if "job" in self.path else b"x" * (MAX_BYTES + 10)
            )

        def log_message(self, *_: object) -> None:
            return

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    base = f"http://127.0.0.1:{server.server_port}"
    try:
        assert cli.apply(f"{base}/a/my-job.yaml?x=1")[1] == ["job/once created"]
        assert cli.present == ["my-job.yaml"]
        assert "cannot be fetched: the server sent 404" in cli.apply(f"{base}/none")[2]
        assert "is larger than 10 MiB" in cli.apply(f"{base}/big")[2]
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
    assert f"{base}/x cannot be fetched" in cli.apply(f"{base}/x")[2]


@contextmanager
def replying(reply: bytes) -> Iterator[str]:
    """Serve one reply to every connection; yield the URL."""

    class Handler(BaseRequestHandler):
        def handle(self) -> None:
            self.request.recv(65536)
            self.request.sendall(reply)

    with ThreadingTCPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_address[1]}"
        finally:
            server.shutdown()
            thread.join()


@pytest.mark.parametrize(
    ("reply", "message"),
    [
        (b"SSH-2.0-OpenSSH_9.2\r\n", "it is not a valid HTTP response (BadStatusLine: SSH-2.0"),
        (b"HTTP/1.1 200 OK\r\n" + b"a: b\r\n" * 200 + b"\r\n", "it is not a valid HTTP response"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 9999\r\n\r\nMANIFEST", "the response ended "),
        (
            b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nffff\r\nMANIFEST",
            "it is not a valid HTTP response (IncompleteRead",
        ),
        (b"HTTP/1.1 404 \x1b]0;x\x07\r\nContent-Length: 0\r\n\r\n", "the server sent 404 \\x1b]0;x\\x07"),
    ],
)
def test_apply_url_unusable_response_is_one_line_and_applies_nothing(
    cli: Cli, reply: bytes, message: str
) -> None:
    with replying(reply.replace(b"MANIFEST", yaml.safe_dump(job()).encode())) as url:
        code, _, err = cli.apply(f"{url}/job.yaml")
    assert (code, err.count("\n")) == (1, 1)
    assert message in err
    assert "\x1b" not in err
    assert cli.present == []


def test_apply_url_with_wrong_port_is_one_line(cli: Cli) -> None:
    code, _, err = cli.apply("http://127.0.0.1:abc/x.yaml")
    assert (code, err.count("\n"), "nonnumeric port: 'abc'" in err) == (1, 1, True)


def test_apply_and_run_control_characters_of_ignored_fields_are_escaped(cli: Cli) -> None:
    document = deployment()
    document["spec"]["\x1b]0;x\x07"] = 1
    path = cli.file("ignored.yaml", document)
    for code, _, err in (
        cli.apply(path),
        cli._run(lambda: run_manifest(cli.selection, RunOptions(Path(path)))),
    ):
        assert code == 0, err
        assert "warning: " in err
        assert "spec.\\x1b]0;x\\x07: is ignored" in err
        assert "\x1b" not in err


def test_apply_and_run_control_characters_of_manifest_are_escaped(cli: Cli) -> None:
    document = deployment()
    document["spec"]["selector"] = {"matchLabels": {"\x1b]0;x\x07": "web"}}
    path = cli.file("hostile.yaml", document)
    for code, _, err in (
        cli.apply(path),
        cli._run(lambda: run_manifest(cli.selection, RunOptions(Path(path)))),
    ):
        assert code == 1
        assert "\\x1b]0;x\\x07" in err
        assert "\x1b" not in err


@pytest.mark.parametrize(
    ("name", "message"),
    [("missing.yaml", "cannot be read: No such file"), (".hidden.yaml", "is a hidden file")],
)
def test_apply_unusable_file_is_one_line(cli: Cli, name: str, message: str) -> None:
    code, _, err = cli.apply(str(cli.files / name))
    assert (code, err.count("\n"), message in err) == (1, 1, True)


def test_get_lists_objects_of_running_stopped_and_broken_files(cli: Cli) -> None:
    cli.apply(cli.file("app.yaml", deployment(), CONFIG, claim(), stateful_set(), job(), cron_job()))
    cli.apply(cli.file("off.yaml", pod_document("off")))
    cli.stop("off")
    (cli.manifests / "bad.yaml").write_text("kind: [")
    code, out, err = cli.get()
    assert code == 0
    assert "bad.yaml" in err
    table = {tuple(line.split()[:2]): line.split()[3:] for line in out[1:]}
    assert table["Deployment", "web"] == ["-", "NodeNotRunning", "app.yaml"]
    assert table["Job", "once"] == ["0/1", "Pending", "app.yaml"]
    assert table["CronJob", "nightly"] == ["-", "Scheduled", "app.yaml"]
    assert table["PersistentVolumeClaim", "data"] == ["-", "Unused", "app.yaml"]
    assert table["Pod", "off"] == ["-", "Stopped", "off.yaml"]
    assert [line.split()[1] for line in cli.get("deploy")[1]] == ["NAME", "web"]
    assert cli.get("jobs", "once", "name")[1] == ["job/once"]
    assert cli.get("job/once", output="name")[1] == ["job/once"]
    code, _, err = cli.get("pod", "nothing")
    assert (code, "there is no pod 'nothing'" in err) == (1, True)
    code, out, err = cli.get("deploy/prod/nothing")
    assert (code, out, "there is no deploy 'prod/nothing'" in err) == (1, [], True)
    assert "is not a kind of a manifest" in cli.get("widgets")[2]


def test_get_missing_object_with_the_name_of_a_retained_claim_is_an_error(cli: Cli) -> None:
    volume_of(cli, "data")
    assert cli.get("pvc", "data")[0] == 0
    code, out, err = cli.get("pod", "data")
    assert (code, out, "there is no pod 'data'" in err) == (1, [], True)


@pytest.mark.parametrize("output", ["json", "yaml"])
def test_get_documents_are_as_written_without_secret_values(cli: Cli, output: str) -> None:
    copies = {"kubectl.kubernetes.io/last-applied-configuration": json.dumps(SECRET), "owner": "me"}
    secret = SECRET | {"metadata": {"name": "s", "annotations": copies}}
    cli.apply(cli.file("all.yaml", deployment(), secret))
    text = "\n".join(cli.get(output=output)[1])
    found = yaml.safe_load(text)
    assert [item["kind"] for item in found["items"]] == ["Deployment", "Secret"]
    assert found["items"][0]["spec"] == deployment()["spec"]
    assert found["items"][1]["stringData"] == {"k": "***"}
    assert set(found["items"][1]["metadata"]["annotations"].values()) == {"***", "me"}
    assert "hunter2" not in text
    for kind, name in (("deploy", "web"), ("deploy/web", None)):
        assert yaml.safe_load("\n".join(cli.get(kind, name, output)[1]))["kind"] == "Deployment"


def test_get_names_are_arguments_of_get_and_rm(cli: Cli) -> None:
    other = deployment("web")
    other["metadata"]["namespace"] = "prod"
    cli.apply(cli.file("a.yaml", deployment()), cli.file("b.yaml", other))
    _, names, _ = cli.get(output="name")
    assert names == ["deployment/web", "deployment/prod/web"]
    for name in names[1:]:
        assert cli.get(name)[0] == 0
        assert cli.rm(name)[0] == 0
    assert cli.present == ["a.yaml"]


def test_stop_and_start_hide_and_show_the_file(cli: Cli) -> None:
    cli.apply(cli.file("app.yaml", deployment(), CONFIG))
    assert cli.stop("web")[1] == ["deployment/web stopped", "configmap/conf stopped"]
    assert cli.present == [".app.yaml.stopped"]
    assert cli.stop("app.yaml")[1][0] == "deployment/web already stopped"
    assert cli.start("deploy/web")[1] == ["deployment/web started", "configmap/conf started"]
    assert cli.present == ["app.yaml"]
    assert cli.start("app.yaml")[1][0] == "deployment/web already started"
    cli.stop("web")
    assert cli.apply(cli.file("app.yaml", deployment(), CONFIG))[1][0] == "deployment/web started"
    assert cli.present == ["app.yaml"]


def test_stop_and_start_replace_no_other_file(cli: Cli) -> None:
    cli.apply(cli.file("app.yaml", deployment()))
    cli.stop("app.yaml")
    (cli.manifests / "app.yaml").write_text(yaml.safe_dump(pod_document("other")))
    before = (cli.manifests / ".app.yaml.stopped").read_text()
    code, _, err = cli.stop("other")
    assert code == 1
    assert "that file exists, too; move one of the two elsewhere" in err
    assert cli.start("web")[0] == 1
    assert (cli.manifests / ".app.yaml.stopped").read_text() == before
    assert cli.present == [".app.yaml.stopped", "app.yaml"]


def test_start_object_that_another_file_has_now_is_a_conflict(cli: Cli) -> None:
    cli.apply(cli.file("app.yaml", deployment()))
    cli.stop("web")
    (cli.manifests / "new.yaml").write_text(yaml.safe_dump(pod_document("web")))
    code, _, err = cli.start("app.yaml")
    assert code == 1
    assert "would both run pod default/web" in err
    assert cli.present == [".app.yaml.stopped", "new.yaml"]


@pytest.mark.parametrize("path", ["path/to/app.yaml", "to/app.yaml", "a/b/c/app.yaml", "/elsewhere/app.yaml"])
def test_rm_path_of_another_directory_removes_what_was_applied(cli: Cli, path: str) -> None:
    cli.apply(cli.file("app.yaml", deployment()))
    assert cli.rm(path)[:2] == (0, ["deployment/web removed"])
    code, _, err = cli.rm("path/to/other.yml")
    assert code == 1
    assert "there is no manifest and no object 'path/to/other.yml'" in err


@pytest.mark.parametrize("path", ["./to/app", "../to/app", "/to/app", "to/app"])
def test_rm_path_without_suffix_of_another_directory_removes_what_was_applied(cli: Cli, path: str) -> None:
    cli.apply(cli.file("app", deployment()))
    assert cli.rm(path)[:2] == (0, ["deployment/web removed"])


def test_rm_path_that_reads_as_kind_names_what_to_type(cli: Cli) -> None:
    cli.apply(cli.file("app", deployment()))
    code, _, err = cli.rm("path/to/app")
    assert (code, cli.present) == (1, ["app"])
    assert "'path' is not a kind of a manifest" in err
    assert err.endswith("; for a manifest, give the name of its file: app\n")
    assert cli.rm("app")[0] == 0


def test_rm_object_with_others_requires_the_file(cli: Cli) -> None:
    cli.apply(cli.file("app.yaml", deployment(), CONFIG))
    code, _, err = cli.rm("web")
    assert (code, cli.present) == (1, ["app.yaml"])
    assert "remove all of them with `pykubelet rm app.yaml`" in err
    assert cli.rm("app.yaml")[1] == ["deployment/web removed", "configmap/conf removed"]
    assert cli.present == []
    code, _, err = cli.rm("app.yaml")
    assert (code, "there is no manifest and no object 'app.yaml'" in err) == (1, True)


def test_rm_ambiguous_name_lists_candidates_and_removes_nothing(cli: Cli) -> None:
    cli.apply(cli.file("a.yaml", job("x")))
    cli.apply(cli.file("b.yaml", {**CONFIG, "metadata": {"name": "x"}}))
    code, _, err = cli.rm("x")
    assert code == 1
    assert "job default/x in a.yaml" in err
    assert cli.present == ["a.yaml", "b.yaml"]
    assert cli.rm("cm/x")[1] == ["configmap/x removed"]
    # A second name that is wrong keeps the first file.
    assert cli.rm("x", "nothing")[0] == 1
    assert cli.present == ["a.yaml"]


def volume_of(cli: Cli, name: str) -> Path:
    path = cli.instance.kubelet_root / "local-volumes/default" / name
    path.mkdir(parents=True)
    (path / "file").write_text("precious")
    return path


def test_rm_keeps_data_of_claims_unless_told(cli: Cli) -> None:
    written = stateful_set(volumeClaimTemplates=[{"metadata": {"name": "data"}, "spec": {}}])
    cli.apply(cli.file("db.yaml", written))
    path = volume_of(cli, "data-db-0")
    _, out, err = cli.rm("db")
    assert out == ["statefulset/db removed"]
    assert f"The data of claim default/data-db-0 stays in {path}." in err
    assert (path / "file").read_text() == "precious"
    assert "data-db-0   default     -       Retained" in cli.get("pvc")[1][1]
    assert cli.rm("pvc/data-db-0")[0] == 1, "not without --volumes"
    assert cli.rm("pvc/data-db-0", volumes=True)[1] == [f"volume {path} deleted"]
    assert not path.exists()


def test_rm_volumes_deletes_data_unless_another_manifest_uses_it(cli: Cli) -> None:
    cli.apply(cli.file("claim.yaml", claim()))
    volumes = [{"name": "v", "persistentVolumeClaim": {"claimName": "data"}}]
    cli.apply(cli.file("app.yaml", deployment(template=template(volumes=volumes))))
    path = volume_of(cli, "data")
    code, _, err = cli.rm("claim.yaml", volumes=True)
    assert code == 1
    assert "is used by deployment default/web in" in err
    assert path.exists()
    assert cli.present == ["app.yaml", "claim.yaml"]
    cli.rm("web")
    assert cli.rm("claim.yaml", volumes=True)[1] == [
        "persistentvolumeclaim/data removed",
        f"volume {path} deleted",
    ]
    assert not path.exists()


def test_rm_volumes_still_mounted_keeps_data_and_says_how_to_continue(cli: Cli) -> None:
    cli.apply(cli.file("claim.yaml", claim()))
    path = volume_of(cli, "data")
    mounted = cli.instance.kubelet_root / "pods/u1/volumes/kubernetes.io~local-volume/default.data"
    mounted.mkdir(parents=True)
    code, _, err = cli.rm("claim.yaml", volumes=True)
    assert code == 1
    assert "still mounted by pod u1" in err
    assert "then `pykubelet rm --volumes pvc/default/data`" in err
    assert (path / "file").exists()
    mounted.rmdir()
    assert cli.rm("pvc/default/data", volumes=True)[0] == 0


@pytest.mark.parametrize("name", ["../../etc", "pvc/../..", "pvc/../../x", "/etc/passwd", "", "."])
def test_rm_volumes_never_leaves_the_directory_of_volumes(cli: Cli, name: str) -> None:
    outside = cli.instance.kubelet_root / "pods"
    outside.mkdir(parents=True)
    volume_of(cli, "data")
    assert cli.rm(name, volumes=True)[0] == 1
    assert outside.is_dir()
    assert (cli.instance.kubelet_root / "local-volumes/default/data/file").exists()


def test_pods_of_matches_owner_name_and_kind() -> None:
    def pod(name: str, kind: str = "", owner: str = "") -> Pod:
        owners = [{"kind": kind, "name": owner, "controller": True}] if kind else []
        return from_document(
            Pod,
            {
                "metadata": {"name": name, "namespace": "default", "ownerReferences": owners},
                "spec": {"nodeName": "N1"},
            },
        )

    pods = [
        pod("web-n1"),
        pod("web-n1", "Deployment", "web"),
        pod("web-1-n1", "Deployment", "web"),
        pod("web-123-0-n1", "Job", "web-123"),
        pod("web-x-0-n1", "Job", "web-x"),
    ]

    def found(kind: str) -> list[str]:
        return [item.metadata.name for item in pods_of(ManifestObject(kind, "default", "web", {}), pods)]

    assert found("Pod") == ["web-n1"]
    assert found("Deployment") == ["web-n1", "web-1-n1"]
    assert found("CronJob") == ["web-123-0-n1"]
    assert found("Job") == []


names = st.sampled_from("abcd")
objects = st.builds(
    lambda kind, name, text: ManifestObject(kind, "default", name, {"text": text}, (f"default/{name}",)),
    st.sampled_from(["Pod", "Deployment"]),
    names,
    st.integers(0, 1),
)
files = st.builds(
    lambda name, items: ManifestFile(
        Path(f"/m/{name}.yaml"), b"", tuple({item.key: item for item in items}.values())
    ),
    names,
    st.lists(objects, min_size=1, max_size=3),
)


def applied(present: list[ManifestFile], new: ManifestFile, *, prune: bool) -> list[ManifestFile] | None:
    try:
        (change,) = plan_apply([new], present, prune=prune)
    except ManifestError:
        return None
    return [
        *(old for old in present if old.path != change.file.path and old.path not in change.remove),
        change.file,
    ]


@given(st.lists(st.tuples(files, st.booleans()), max_size=8))
def test_plan_apply_any_sequence_loses_nothing_and_has_no_duplicates(
    steps: list[tuple[ManifestFile, bool]],
) -> None:
    present: list[ManifestFile] = []
    for new, prune in steps:
        before = {item.key for file in present for item in file.objects}
        after = applied(present, new, prune=prune)
        if after is None:
            continue
        keys = [item.key for file in after for item in file.objects]
        pods = [pod for file in after for item in file.objects for pod in item.pods]
        assert len(set(keys)) == len(keys)
        assert len(set(pods)) == len(pods)
        assert len({file.path for file in after}) == len(after)
        assert new.keys <= set(keys)
        if not prune:
            assert before <= set(keys)
        present = after


def test_read_directory_hostile_files_are_listed_with_problems(cli: Cli) -> None:
    (cli.manifests / "deep.yaml").write_text("a: " + "[" * 5000)
    (cli.manifests / "binary").write_bytes(bytes(range(256)))
    (cli.manifests / "dangling").symlink_to("/nowhere")
    (cli.manifests / "dir").mkdir()
    found = read_directory(cli.manifests, Node.of(cli.instance))
    assert [(file.path.name, bool(file.problems)) for file in found] == [
        ("binary", True),
        ("deep.yaml", True),
    ]


@pytest.mark.parametrize("command", ["apply", "run"])
@pytest.mark.parametrize(
    ("standalone", "served", "accepted"),
    [
        (False, ["configmaps", "serviceaccounts"], True),
        (False, ["configmaps"], False),
        (False, [], False),
        (False, None, False),
        (True, ["configmaps", "persistentvolumeclaims", "secrets"], False),
        (True, None, False),
    ],
)
def test_apply_and_run_api_reference_accepted_as_by_the_kubelet(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    command: str,
    standalone: bool,
    served: list[str] | None,
    accepted: bool,
) -> None:
    root, manifests = tmp_path / "root", tmp_path / "manifests"
    root.mkdir()
    manifests.mkdir()
    info = NodeInfo(
        node_name="n1",
        root_dir=str(root),
        cert_dir=str(root / "pki"),
        static_pod_path=str(manifests),
        pod_logs_dir=str(root / "logs"),
        container_runtime_endpoint="unix:///none.sock",
        standalone=standalone,
        served=served,
    )
    write_node_info(root, info)
    pod = pod_document("web")
    pod["spec"]["serviceAccountName"] = "reader"
    pod["spec"]["volumes"] = [{"name": "v", "configMap": {"name": "conf"}}]
    file = tmp_path / "web.yaml"
    file.write_text(yaml.safe_dump(pod))
    selection = NodeSelection(root_dir=root)
    if command == "apply":
        code = run_apply(selection, [str(file)])
    else:
        code = run_manifest(selection, RunOptions(file))
    err = capsys.readouterr().err
    assert code == (0 if accepted else 1), err
    assert [path.name for path in manifests.iterdir()] == (["web.yaml"] if accepted else [])
    assert ("configMap" in err) == (not accepted and not standalone and served != ["configmaps"])
    assert ("serviceAccountName" in err) == (not accepted)


def test_down_with_data_of_claims_removes_nothing_unless_told(
    cli: Cli, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    called: list[Instance] = []

    async def down(instance: Instance, _: object, *, keep_data: bool) -> list[str]:
        assert not keep_data
        called.append(instance)
        return []

    monkeypatch.setattr(up, "down", down)
    monkeypatch.setattr(up, "is_root", lambda: True)
    path = volume_of(cli, "data")
    assert up.run_down(cli.instance.data_dir) == 1
    assert (
        f"data of 1 claims (default/data): say --volumes to delete it, too; it is in {path.parents[1]}"
        in (capsys.readouterr().err)
    )
    assert called == []
    assert up.run_down(cli.instance.data_dir, volumes=True) == 0
    assert len(called) == 1
