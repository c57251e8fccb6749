"""`pykubelet run`: where a manifest goes and what becomes of its pod, as tables; and without a node."""

import asyncio
import json
import os
import time
from asyncio.subprocess import PIPE
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from hypothesis import given
from hypothesis import strategies as st

from pykubelet.api.meta import from_document, to_json
from pykubelet.api.pod import Pod
from pykubelet.cli.manifests.run import (
    FAILURE_REASONS,
    RunOutcome,
    explain,
    run_outcome,
)
from pykubelet.cli.manifests.run_view import (
    ContainerProgress,
    PlainView,
    PodSnapshot,
    container_progress,
    pull_text,
    relevant_pulls,
)
from pykubelet.images.pull_progress import PullProgress
from pykubelet.podconfig.manifests import read_manifest
from pykubelet.podconfig.pod_history import Event
from pykubelet.podconfig.static_pods import (
    InstallationPlan,
    ManifestConflict,
    Names,
    find_running_pod,
    install_manifest,
    names_of,
    plan_installation,
    read_manifest_dir,
    static_pods,
)
from pykubelet.podconfig.workloads.job import JobRecord, pod_uid, run_hash
from pykubelet.podconfig.workloads.records import DIRECTORY, WorkloadRecord, write_records
from pykubelet.standalone.data_dir import hold_lock
from pykubelet.standalone.instance import Instance
from pykubelet.util.files import write_atomically
from tests.support.cli_node import PYKUBELET, Terminal, answering, command, environment, pykubelet
from tests.support.pod_view import START, ScriptedView, pod_of
from tests.unit.podconfig.workloads.making import job, job_spec

WEB, DB, API = "pod default/web", "pod default/db", "configMap kube-system/api"
FOLDER = Path("/m")
POD = "apiVersion: v1\nkind: Pod\nmetadata: {name: %s}\nspec: {containers: [{name: main, image: busybox}]}\n"


def names(*given_names: str) -> Names:
    return frozenset(given_names)


@pytest.mark.parametrize(
    ("mine", "present", "replace", "plan"),
    [
        (names(WEB), {}, False, InstallationPlan(FOLDER / "web.yaml")),
        (names(WEB), {"web.yaml": names(WEB)}, False, InstallationPlan(FOLDER / "web.yaml")),
        (names(WEB, DB), {"web.yaml": names(WEB)}, False, InstallationPlan(FOLDER / "web.yaml")),
        (names(WEB), {"web.yaml": names()}, False, InstallationPlan(FOLDER / "web.yaml")),
        (names(WEB), {"other.yaml": names(DB, API)}, False, InstallationPlan(FOLDER / "web.yaml")),
        (names(WEB), {"other.yaml": None}, False, InstallationPlan(FOLDER / "web.yaml")),
        (names(WEB), {"web.yaml": names(DB)}, True, InstallationPlan(FOLDER / "web.yaml")),
        (names(WEB), {"web.yaml": None}, True, InstallationPlan(FOLDER / "web.yaml")),
        (
            names(WEB),
            {"other.yaml": names(WEB)},
            True,
            InstallationPlan(FOLDER / "web.yaml", (FOLDER / "other.yaml",)),
        ),
    ],
)
def test_plan_installation_target_and_removed_files(
    mine: Names, present: Mapping[str, Names | None], replace: bool, plan: InstallationPlan
) -> None:
    there = {FOLDER / file: pods for file, pods in present.items()}
    assert plan_installation(FOLDER / "web.yaml", mine, there, replace=replace) == plan


@pytest.mark.parametrize(
    ("mine", "present", "replace", "says"),
    [
        (names(WEB), {"web.yaml": names(DB)}, False, "web.yaml is there already and holds pod default/db"),
        (names(WEB), {"web.yaml": names(WEB, DB)}, False, "holds pod default/db"),
        (names(WEB), {"web.yaml": None}, False, "holds something that cannot be read"),
        (names(WEB), {"other.yaml": names(WEB)}, False, "default/web is already in /m/other.yaml: rename"),
        (names(WEB), {"other.yaml": names(WEB, DB)}, True, "with others: take it out there"),
    ],
)
def test_plan_installation_other_pod_lost_or_duplicated_raises_conflict(
    mine: Names, present: Mapping[str, Names | None], replace: bool, says: str
) -> None:
    there = {FOLDER / file: pods for file, pods in present.items()}
    with pytest.raises(ManifestConflict, match=says):
        plan_installation(FOLDER / "web.yaml", mine, there, replace=replace)


pods = st.frozensets(st.sampled_from([WEB, DB, API]), max_size=3)
folders = st.dictionaries(st.sampled_from(["a", "b", "web.yaml"]).map(lambda name: FOLDER / name), pods)


@given(pods.filter(bool), folders, st.booleans())
def test_plan_installation_any_manifests_each_pod_in_exactly_one_file(
    mine: Names, present: dict[Path, Names], replace: bool
) -> None:
    target = FOLDER / "web.yaml"
    try:
        plan = plan_installation(target, mine, present, replace=replace)
    except ManifestConflict:
        return
    after = {file: held for file, held in present.items() if file not in plan.remove} | {plan.target: mine}
    for name in mine:
        assert [file for file, held in after.items() if name in held] == [target]
    if not replace:
        assert frozenset[str]().union(*present.values()) <= frozenset[str]().union(*after.values())


def test_plan_installation_hidden_file_or_duplicate_pod_raises_conflict() -> None:
    with pytest.raises(ManifestConflict, match="hidden"):
        plan_installation(FOLDER / ".web.yaml", names(WEB), {}, replace=True)
    twice = read_manifest(f"{POD % 'a'}---\n{POD % 'a'}".encode(), "x")
    with pytest.raises(ManifestConflict, match="default/a is in the manifest twice"):
        names_of(twice)


def test_install_manifest_writes_target_and_removes_replaced_files(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text(POD % "a")
    (tmp_path / "bad.yaml").write_text("{")
    (tmp_path / ".hidden").write_text(POD % "h")
    (tmp_path / "folder").mkdir()
    assert read_manifest_dir(tmp_path) == {
        tmp_path / "a.yaml": names("pod default/a"),
        tmp_path / "bad.yaml": None,
    }
    install_manifest(InstallationPlan(tmp_path / "b.yaml", (tmp_path / "a.yaml",)), b"new")
    assert sorted(path.name for path in tmp_path.iterdir()) == [".hidden", "b.yaml", "bad.yaml", "folder"]
    assert (tmp_path / "b.yaml").read_bytes() == b"new"
    assert (tmp_path / "b.yaml").stat().st_mode & 0o777 == 0o644


def test_write_atomically_failure_leaves_no_temporary_file(tmp_path: Path) -> None:
    (tmp_path / "target").mkdir()
    with pytest.raises(OSError):
        write_atomically(tmp_path / "target", b"new")
    assert [path.name for path in tmp_path.iterdir()] == ["target"]


def test_find_running_pod_matches_only_same_manifest_and_file() -> None:
    def node_has(data: bytes) -> list[Pod]:
        origin = str(FOLDER / "web.yaml")
        return static_pods(data, source="file", origin=origin, node_name="node1", now=time.time_ns())

    data = (POD % "web").encode()
    changed = data.replace(b"busybox", b"httpd")
    (written,) = read_manifest(data, "x").pods
    (mine,) = node_has(data)
    assert find_running_pod([*node_has(changed), mine], written, FOLDER / "web.yaml") is mine
    assert find_running_pod(node_has(changed), written, FOLDER / "web.yaml") is None
    assert find_running_pod([mine], written, FOLDER / "other.yaml") is None
    assert find_running_pod([], written, FOLDER / "web.yaml") is None


READY = [{"type": "Ready", "status": "True"}]
PROBED = {"containers": [{"name": "main", "readinessProbe": {"exec": {"command": ["true"]}}}]}


def shown(
    state: dict[str, Any],
    *,
    phase: str = "Running",
    ready: bool = False,
    restarts: int = 0,
    spec: dict[str, Any] | None = None,
    **status: Any,
) -> Pod:
    main = {"name": "main", "state": state, "ready": ready, "restartCount": restarts}
    conditions = READY if ready else []
    document = {
        "phase": phase,
        "conditions": conditions,
        "containerStatuses": [main | status.pop("more", {})],
    }
    return pod_of("p", "u", spec=spec or {}, status=document | status)


def waits(reason: str) -> dict[str, Any]:
    return {"waiting": {"reason": reason, "message": "because"}}


RUN: dict[str, Any] = {"running": {}}
ENDED = {"terminated": {"exitCode": 3, "reason": "Error", "message": "no config"}}


@pytest.mark.parametrize(
    ("pod", "state", "seconds", "verdict"),
    [
        (shown(waits("ContainerCreating"), phase="Pending"), "syncing", 0, None),
        (shown(waits("ErrImagePull"), phase="Pending"), "syncing", 0, None),
        (shown(RUN), "syncing", 0, None),
        (shown(RUN, ready=True), "syncing", 0, None),
        (shown(RUN, ready=True), "syncing", 1.9, None),
        (shown(RUN, ready=True), "syncing", 2, RunOutcome(True, "ready")),
        (shown(RUN, ready=True, spec=PROBED), "syncing", 0, RunOutcome(True, "ready")),
        (
            shown({"terminated": {"exitCode": 0}}, phase="Succeeded"),
            "syncing",
            0,
            RunOutcome(True, "succeeded"),
        ),
        (shown(ENDED, phase="Failed"), "syncing", 0, RunOutcome(False, "Error")),
        (shown(ENDED), "syncing", 0, None),
        (shown(RUN, phase="Failed", reason="Evicted"), "syncing", 0, RunOutcome(False, "Evicted")),
        (shown(RUN, ready=True), "terminating", 9, RunOutcome(False, "Terminating")),
        *(
            (shown(waits(reason)), "syncing", 0, RunOutcome(False, reason))
            for reason in sorted(FAILURE_REASONS)
        ),
        (shown(waits("CrashLoopBackOff"), spec={"restartPolicy": "OnFailure"}), "syncing", 0, None),
        (
            shown(waits("ImagePullBackOff"), spec={"restartPolicy": "OnFailure"}),
            "syncing",
            0,
            RunOutcome(False, "ImagePullBackOff"),
        ),
        (
            shown(
                waits("PodInitializing"),
                initContainerStatuses=[{"name": "i", "state": waits("CrashLoopBackOff")}],
            ),
            "syncing",
            0,
            RunOutcome(False, "CrashLoopBackOff"),
        ),
    ],
)
def test_run_outcome_by_pod_status_and_elapsed_time(
    pod: Pod, state: str, seconds: float, verdict: RunOutcome | None
) -> None:
    assert run_outcome(pod, state, seconds) == verdict


def test_container_progress_lists_init_sidecar_and_main_containers() -> None:
    pod = shown(
        RUN,
        ready=True,
        restarts=2,
        spec={
            "containers": [{"name": "main"}],
            "initContainers": [{"name": "i"}, {"name": "s", "restartPolicy": "Always"}],
        },
        initContainerStatuses=[{"name": "i", "state": RUN}, {"name": "s", "state": RUN}],
    )
    assert container_progress(pod, START) == [
        ContainerProgress("i", "running"),
        ContainerProgress("s", "running, not ready yet"),
        ContainerProgress("main", "running, ready (restart 2)"),
    ]


def test_explain_failed_pod_lists_states_and_last_warnings() -> None:
    events = [
        Event("Normal", "Started", "Container started", "", 1, 9),
        Event("Warning", "BackOff", "Back-off", "", 1, 5, 4),
        *(Event("Warning", f"W{number}", "w", "", 1, number) for number in range(4)),
    ]
    pod = shown(waits("CrashLoopBackOff"), more={"lastState": ENDED})
    assert explain(pod, events, START) == [
        "container main: Waiting: CrashLoopBackOff: because",
        "container main before: Terminated: Error, exit code 3: no config",
        "W2: w",
        "W3: w",
        "BackOff: Back-off (x4)",
    ]
    refused = pod_of("p", "u", status={"phase": "Failed", "reason": "OutOfcpu", "message": "no room"})
    assert explain(refused, [], START) == ["OutOfcpu: no room"]


def test_plain_view_unchanged_snapshot_printed_once(capsys: pytest.CaptureFixture[str]) -> None:
    event = Event("Normal", "Pulled", "there \x1b[31m", "", 1, 1)
    with PlainView() as view:
        view.show([PodSnapshot("p")])
        view.show([PodSnapshot("p")])
        view.show([PodSnapshot("p", shown(RUN, ready=True), "syncing", [event])])
        view.show([PodSnapshot("p", shown(RUN, ready=True), "syncing", [event])])
    lines = [line.split(maxsplit=1)[1] for line in capsys.readouterr().out.splitlines()]
    assert lines == ["p: handed over", "p: Running", "p: Pulled: there \\x1b[31m"]


def test_relevant_pulls_only_the_pods_images_once_and_bounded() -> None:
    images = [f"i{number}" for number in range(9)]
    pod = pod_of("p", "u", spec={"containers": [{"name": image, "image": image} for image in images]})
    pulls = [PullProgress(image, number) for number, image in enumerate(("other", *images, "i0"))]
    found = relevant_pulls([PodSnapshot("p", pod), PodSnapshot("q")], pulls)
    assert [pull.image for pull in found] == images[:5]


@pytest.mark.parametrize(
    ("pull", "text"),
    [
        (PullProgress("i", 0), "pulling i"),
        (PullProgress("i\x1b[2J", 0, 1, 0, 0, 0), "pulling i\\x1b[2J"),
        (PullProgress("i", 0, 512, 2048, 1, 3), "pulling i: 512 B of 2.0 KiB (25%), 1 of 3 layers"),
        (PullProgress("i", 0, 4096, 2048), "pulling i: 2.0 KiB of 2.0 KiB (100%)"),
    ],
)
def test_pull_text_as_far_as_reported(pull: PullProgress, text: str) -> None:
    assert pull_text(pull) == text


def test_plain_view_pull_printed_every_five_seconds(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 0.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    snapshot = PodSnapshot("p", shown(waits("ContainerCreating")))
    with PlainView() as view:
        for second in range(13):
            now = second
            view.show([snapshot], [PullProgress("i", 0, min(second, 9), 10)])
    lines = [line for line in capsys.readouterr().out.splitlines() if "pulling" in line]
    assert [line.split()[0] for line in lines] == ["5.0s", "10.0s"]
    assert lines[1].endswith("pulling i: 9 B of 10 B (90%)")


@pytest.fixture
def instance(data_dir: Path) -> Instance:
    found = Instance.at(data_dir)
    found.manifests.mkdir(parents=True)
    return found


async def test_pykubelet_run_kubelet_not_running_installs_manifest(
    instance: Instance, tmp_path: Path
) -> None:
    file = tmp_path / "web.yaml"
    file.write_text(POD % "web")
    ran = await pykubelet(instance, "run", str(file))
    assert (ran.code, ran.err) == (0, "")
    assert f"starts with the next `pykubelet up --data-dir {instance.data_dir}`" in ran.out
    assert (instance.manifests / "web.yaml").read_text() == POD % "web"
    assert [path.name for path in instance.manifests.iterdir()] == ["web.yaml"]


CONFIG = "apiVersion: v1\nkind: ConfigMap\nmetadata: {name: page}\ndata: {key: value}\n"
HIDDEN = "apiVersion: v1\nkind: Secret\nmetadata: {name: s}\nstringData: {key: hunter2}\n"


@pytest.mark.parametrize(
    ("text", "mode", "handed", "says"),
    [
        (CONFIG, 0o644, ["configMap default/page"], "it is used with the next"),
        (HIDDEN, 0o600, ["secret default/s"], "it is used with the next"),
        (
            f"{POD % 'web'}---\n{CONFIG}---\n{HIDDEN}",
            0o600,
            ["configMap default/page", "secret default/s", "web"],
            "the pod starts with the next",
        ),
    ],
)
async def test_pykubelet_run_configmap_and_secret_installed_without_content_output(
    instance: Instance, tmp_path: Path, text: str, mode: int, handed: list[str], says: str
) -> None:
    file = tmp_path / "all.yaml"
    file.write_text(text)
    ran = await pykubelet(instance, "run", str(file))
    assert (ran.code, ran.err) == (0, "")
    target = instance.manifests / "all.yaml"
    assert ran.out.splitlines()[:-1] == [f"{name}: handed to the node as {target}" for name in handed]
    assert says in ran.out
    assert "hunter2" not in ran.out
    assert (target.read_text(), target.stat().st_mode & 0o777) == (text, mode)
    file.write_text(POD % "other")
    ran = await pykubelet(instance, "run", str(file))
    assert (ran.code, f"holds {handed[0]}" in ran.err) == (1, True)


async def test_pykubelet_run_only_objects_kubelet_running_returns_immediately(
    instance: Instance, tmp_path: Path
) -> None:
    (tmp_path / "page.yaml").write_text(CONFIG)
    with hold_lock(instance, "up"):
        async with answering(instance, ScriptedView()):
            ran = await pykubelet(instance, "run", str(tmp_path / "page.yaml"))
    assert (ran.code, ran.err) == (0, "")
    assert (instance.manifests / "page.yaml").exists()


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("kind: Pod", "must say what it is"),
        ("apiVersion: v1\nkind: PodList\nitems: []\n", "holds no pod"),
        (POD % "Not_A_Name", "metadata.name"),
        (POD % "web" + "---\n" + POD % "web", "in the manifest twice"),
        ((POD % "web").replace("busybox", ""), "image"),
        (CONFIG.replace("value", "8080"), "ConfigMap 'page': data.key: must be text: put it in quotes"),
        (POD % "web" + "---\n" + HIDDEN + "data: {key: hunter2}\n", "data.key: is not base64"),
        (CONFIG + "---\n" + CONFIG, "configMap default/page is in the manifest twice"),
    ],
)
async def test_pykubelet_run_invalid_manifest_exits_1_and_installs_nothing(
    instance: Instance, tmp_path: Path, text: str, says: str
) -> None:
    file = tmp_path / "bad.yaml"
    file.write_text(text)
    ran = await pykubelet(instance, "run", str(file))
    assert ran.code == 1
    assert says in ran.err
    assert "hunter2" not in ran.err
    assert list(instance.manifests.iterdir()) == []


async def test_pykubelet_run_file_name_with_undecodable_bytes_exits_1_with_one_line(
    instance: Instance, tmp_path: Path
) -> None:
    manifest = tmp_path / os.fsdecode(b"web-\xff.yaml")
    manifest.write_text(POD % "web")
    async with answering(instance, ScriptedView()):
        ran = await pykubelet(instance, "run", "-d", str(manifest))
    assert ran.code == 1
    assert (
        ran.err
        == f"pykubelet run: {tmp_path}/web-\\udcff.yaml: has a name that is not UTF-8: rename the file\n"
    )
    assert list(instance.manifests.iterdir()) == []


async def test_pykubelet_file_name_with_undecodable_bytes_is_printed_escaped(tmp_path: Path) -> None:
    file = tmp_path / os.fsdecode(b"\xff.yaml")
    file.write_text("apiVersion: kubelet.config.k8s.io/v1beta1\nkind: KubeletConfiguration\n")
    process = await asyncio.create_subprocess_exec(
        PYKUBELET, "config", "validate", str(file), stdout=PIPE, stderr=PIPE, env=environment()
    )
    out, err = await process.communicate()
    assert (process.returncode, out.decode(), err) == (0, f"{tmp_path}/\\udcff.yaml: ok\n", b"")


async def test_pykubelet_run_missing_file_or_data_dir_exits_1(instance: Instance, tmp_path: Path) -> None:
    ran = await pykubelet(instance, "run", str(tmp_path / "none.yaml"))
    assert (ran.code, ran.err) == (
        1,
        f"pykubelet run: {tmp_path}/none.yaml cannot be read: No such file or directory\n",
    )
    instance.manifests.rmdir()
    (tmp_path / "web.yaml").write_text(POD % "web")
    ran = await pykubelet(instance, "run", str(tmp_path / "web.yaml"))
    assert ran.code == 1
    assert "there is no node in" in ran.err
    assert (await pykubelet(instance, "run", str(tmp_path / "web.yaml"), "--timeout", "soon")).code == 2


async def test_pykubelet_run_pod_never_appears_exits_1_after_timeout(
    instance: Instance, tmp_path: Path
) -> None:
    (tmp_path / "web.yaml").write_text(POD % "web")
    with hold_lock(instance, "up"):
        async with answering(instance, ScriptedView()):
            assert (await pykubelet(instance, "run", "--detach", str(tmp_path / "web.yaml"))).code == 0
            ran = await pykubelet(instance, "run", "--timeout", "500ms", str(tmp_path / "web.yaml"))
    assert ran.code == 1
    assert "the node has not taken the manifest up" in ran.err


def job_file(directory: Path, **spec: object) -> tuple[Path, str]:
    """Write the manifest of a Job; return it and the hash of its run."""
    file = directory / "job.yaml"
    file.write_text(json.dumps(job(**spec)))  # type: ignore[arg-type]
    return file, run_hash(job_spec(**spec))  # type: ignore[arg-type]


def record_job(instance: Instance, **fields: Any) -> None:
    record = WorkloadRecord(
        kind="Job", namespace="default", name="once", job=from_document(JobRecord, {"uid": "run", **fields})
    )
    write_records(instance.kubelet_root / DIRECTORY, {record.key: record})


@pytest.mark.parametrize(
    ("fields", "code", "says"),
    [
        ({"outcome": "Complete"}, 0, "once: complete"),
        (
            {"outcome": "Failed", "reason": "BackoffLimitExceeded", "message": "too often"},
            1,
            "once: failed (BackoffLimitExceeded: too often)",
        ),
    ],
)
async def test_pykubelet_run_job_waits_for_its_outcome(
    instance: Instance, tmp_path: Path, fields: dict[str, str], code: int, says: str
) -> None:
    file, template = job_file(tmp_path)
    record_job(instance, template="of another manifest", outcome="Complete" if code else "Failed")
    with hold_lock(instance, "up"):
        async with answering(instance, ScriptedView()):
            terminal = Terminal(command(instance, "run", str(file)))
            await terminal.until("handed over")
            record_job(instance, template=template)
            record_job(instance, template=template, **fields)
            await terminal.until(says)
            assert await terminal.end() == code


async def test_pykubelet_run_job_whose_image_cannot_be_pulled_exits_1(
    instance: Instance, tmp_path: Path
) -> None:
    file, template = job_file(tmp_path)
    record_job(instance, template=template, pods=[{"serial": 0}])
    failing = shown(waits("ImagePullBackOff"), phase="Pending")
    failing.metadata.uid = pod_uid("run", 0)
    with hold_lock(instance, "up"):
        async with answering(instance, ScriptedView([failing])):
            ran = await pykubelet(instance, "run", str(file))
    assert ran.code == 1
    assert "once: ImagePullBackOff" in ran.err


async def test_pykubelet_run_job_that_is_suspended_or_unfinished(instance: Instance, tmp_path: Path) -> None:
    file, template = job_file(tmp_path)
    record_job(instance, template=template)
    with hold_lock(instance, "up"):
        async with answering(instance, ScriptedView()):
            ran = await pykubelet(instance, "run", "--timeout", "500ms", str(file))
            assert (ran.code, "not complete after" in ran.err) == (1, True)
            assert "has not taken the manifest up" not in ran.err
            job_file(tmp_path, suspend=True)
            assert (await pykubelet(instance, "run", "--replace", str(file))).code == 0


async def test_pykubelet_run_terminal_crashloop_shows_progress_and_exits_1(
    instance: Instance, tmp_path: Path
) -> None:
    (tmp_path / "web.yaml").write_text(POD % "web")
    origin = str(instance.manifests / "web.yaml")
    data = (POD % "web").encode()
    (pod,) = static_pods(data, source="file", origin=origin, node_name="node1", now=0)
    pod.status = shown(waits("ContainerCreating"), phase="Pending").status
    view = ScriptedView([pod], events={pod.uid: [Event("Warning", "BackOff", "Back-off \x1b[2J", "", 1, 1)]})

    async def pulls(_: web.Request) -> web.Response:
        return web.Response(body=to_json([PullProgress("busybox", 0, 512, 1024)]))

    with hold_lock(instance, "up"):
        async with answering(instance, view, [web.get("/images/pulls", pulls)]):
            terminal = Terminal(command(instance, "run", str(tmp_path / "web.yaml")))
            await terminal.until("Waiting: ContainerCreating")
            await terminal.until("pulling busybox: 512 B of 1.0 KiB (50%)")
            pod.status = shown(waits("CrashLoopBackOff"), more={"lastState": ENDED}).status
            await terminal.until("container main before: Terminated: Error, exit code 3: no config")
            assert await terminal.end() == 1
    assert b"Back-off \\x1b[2J" in terminal.said
    assert b"\x1b[2J" not in terminal.said
    assert b"\x1b[?25h" in terminal.said
