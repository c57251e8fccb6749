"""`pykubelet support-bundle` with planted secrets, none of which may be in the archive."""

import asyncio
import json
import os
import tarfile
from pathlib import Path

import pytest
from aiohttp import web

from pykubelet.cli.node import support_bundle
from pykubelet.cli.node.support_bundle import masked_log, run_support_bundle, unit_of
from pykubelet.cli.options import NodeSelection
from pykubelet.server.node_info import NodeInfo, write_node_info
from pykubelet.standalone.instance import Instance
from tests.support.cli_node import answering
from tests.support.pod_view import ScriptedView, pod_of

PLANTED = "hunter2-planted"
TOKEN = "eyJhbGciOiJSUzI1NiJ9.eyJzdWIiOiJwbGFudGVkIn0.c2lnbmF0dXJl"
POD = pod_of(
    "web",
    "u1",
    metadata={"annotations": {"kubectl.kubernetes.io/last-applied-configuration": f"{{env: {PLANTED}}}"}},
    spec={
        "containers": [
            {
                "name": "main",
                "image": f"https://user:{PLANTED}@registry/i",
                "command": ["sh", "-c", f"PASSWORD={PLANTED} run"],
                "env": [{"name": "PLAIN", "value": PLANTED}],
                "livenessProbe": {"httpGet": {"port": 80, "httpHeaders": [{"name": "X", "value": PLANTED}]}},
            }
        ]
    },
    status={
        "containerStatuses": [
            {
                "name": "main",
                "state": {"terminated": {"exitCode": 1, "message": f"started\npassword={PLANTED} is wrong"}},
            }
        ]
    },
)


def members(path: Path) -> dict[str, bytes]:
    with tarfile.open(path) as archive:
        found = {}
        for member in archive.getmembers():
            file = archive.extractfile(member)
            assert file is not None
            found[member.name.partition("/")[2]] = file.read()
    return found


@pytest.fixture
def instance(data_dir: Path, monkeypatch: pytest.MonkeyPatch) -> Instance:
    monkeypatch.setattr(support_bundle, "_command", lambda *arguments: " ".join(arguments).encode())
    (data_dir / "kubelet").mkdir(parents=True)
    return Instance.at(data_dir)


async def test_support_bundle_planted_secrets_absent(instance: Instance, tmp_path: Path) -> None:
    async def configz(_: web.Request) -> web.Response:
        return web.json_response(
            {"kubeletconfig": {"staticPodURLHeader": {"Authorization": [PLANTED]}, "maxPods": 110}}
        )

    root = instance.kubelet_root
    (root / "pki").mkdir()
    for name in ("pki/kubelet.key", "kubeconfig", "pykubelet-node.json.bak"):
        (root / name).write_text(PLANTED)
    (root / "cpu_manager_state").write_text(
        json.dumps({"policyName": "none", "token": PLANTED, "data": {"a": [PLANTED], "b": {"c": PLANTED}}})
    )
    log = instance.pod_logs / "default_web_u1" / "main" / "0.log"
    log.parent.mkdir(parents=True)
    log.write_text(
        f"t stdout F Authorization: Bearer {PLANTED}\nt stdout F {TOKEN}\nt stdout F password={PLANTED}\n"
        f't stdout F {{"password":"{PLANTED}"}}\nt stdout F token: {PLANTED}\nt stdout F fine\n'
    )
    (log.parent / "1.log").symlink_to(root / "kubeconfig")
    path = tmp_path / "b.tar.gz"
    async with answering(instance, ScriptedView(listed=[POD]), [web.get("/configz", configz)]):
        code = await asyncio.to_thread(run_support_bundle, NodeSelection(instance.data_dir), path)
    assert code == 0
    assert path.stat().st_mode & 0o777 == 0o600
    found = members(path)
    for name, content in found.items():
        assert PLANTED.encode() not in content, (name, content)
        assert TOKEN.encode() not in content, name
    assert json.loads(found["configz.json"])["kubeletconfig"]["maxPods"] == 110
    pod = json.loads(found["pods.json"])["pods"][0]
    assert pod["spec"]["containers"][0]["env"][0]["name"] == "PLAIN"
    ended = pod["status"]["containerStatuses"][0]["state"]["terminated"]
    assert ended["message"].splitlines()[0] == "started"
    assert b"fine" in found["logs/pods/default_web_u1/main/0.log"]
    assert json.loads(found["state/cpu_manager_state"])["policyName"] == "none"
    assert found["pressure.json"].startswith(b"not collected: ")  # this node has no such route


JOURNALCTL = """#!/bin/sh
echo "$@" > {arguments}
echo "password={secret} is cut"
yes "2026-01-02T03:04:05+0000 n kubelet[1]: padding" | head -n 30000
echo "2026-01-02T03:04:05+0000 n kubelet[1]: password={secret}"
echo "2026-01-02T03:04:05+0000 n kubelet[1]: Authorization: Bearer {secret}"
echo "2026-01-02T03:04:05+0000 n kubelet[1]: the end"
"""


def journalctl(directory: Path, monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    """Install an executable of this name."""
    programs = directory / "bin"
    programs.mkdir()
    (programs / "journalctl").write_text(text)
    (programs / "journalctl").chmod(0o755)
    monkeypatch.setenv("PATH", str(programs), prepend=os.pathsep)


def test_support_bundle_log_of_kubelet_bounded_and_masked(
    instance: Instance, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    arguments, log = tmp_path / "arguments", tmp_path / "kubelet.log"
    journalctl(tmp_path, monkeypatch, JOURNALCTL.format(arguments=arguments, secret=PLANTED))
    log.write_text(f"I0102 started\nE0102 token: {PLANTED}\n")
    root = instance.kubelet_root
    info = NodeInfo(
        node_name="n",
        root_dir=str(root),
        cert_dir=str(root),
        pod_logs_dir=str(instance.pod_logs),
        container_runtime_endpoint="",
        log_file=str(log),
    )
    write_node_info(root, info)
    assert run_support_bundle(NodeSelection(instance.data_dir), tmp_path / "b.tar.gz") == 0
    found = members(tmp_path / "b.tar.gz")
    journal = found["logs/kubelet-journal.log"]
    assert PLANTED.encode() not in journal + found["logs/kubelet.log"]
    assert b"the end" in journal
    assert support_bundle.MAX_LOG_BYTES // 2 < len(journal) <= support_bundle.MAX_LOG_BYTES + 100
    assert found["logs/kubelet.log"].startswith(b"I0102 started\n")
    assert arguments.read_text().split() == [
        *("--no-pager", "-o", "short-iso", "-n", "20000", "-u", f"{instance.name}.service")
    ]


def test_support_bundle_journal_that_does_not_end_is_left_out(
    instance: Instance, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    journalctl(tmp_path, monkeypatch, "#!/bin/sh\necho first\nexec sleep 600\n")
    monkeypatch.setattr(support_bundle, "_TIMEOUT_SECONDS", 0.5)
    assert run_support_bundle(NodeSelection(instance.data_dir), tmp_path / "b") == 0
    journal = members(tmp_path / "b")["logs/kubelet-journal.log"]
    assert journal == b"not collected: journalctl took longer than 0.5s\n"


@pytest.mark.parametrize(
    ("cgroups", "unit"),
    [
        ("0::/system.slice/kubelet.service/init.scope\n", "kubelet.service"),
        ("4:cpu:/k8s.slice\n1:name=systemd:/system.slice/own.service\n", "own.service"),
        ("0::/user.slice/session.scope\n", "kubelet.service"),
    ],
)
def test_unit_of_cgroups(cgroups: str, unit: str) -> None:
    assert (unit_of(cgroups) or "kubelet.service") == unit


def test_support_bundle_doctor_and_certs_of_the_selected_node(tmp_path: Path, instance: Instance) -> None:
    root = tmp_path / "root"
    root.mkdir()
    assert run_support_bundle(NodeSelection(root_dir=root), tmp_path / "b") == 0
    found = members(tmp_path / "b")
    assert found["doctor.json"] == f"doctor --json --root-dir {root}".encode()
    assert found["certs.json"] == f"certs -o json --root-dir {root}".encode()


async def test_support_bundle_of_stopped_node_and_wrong_files(
    instance: Instance, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    selection = NodeSelection(instance.data_dir)
    path = tmp_path / "b.tar.gz"
    assert run_support_bundle(selection, path) == 0
    assert b"no node runs" in members(path)["pods.json"]
    capsys.readouterr()
    before = path.read_bytes()
    assert run_support_bundle(selection, path) == 1
    assert "exists: name a new file" in capsys.readouterr().err
    assert path.read_bytes() == before
    assert run_support_bundle(selection, tmp_path / "none" / "b") == 1
    assert "No such file" in capsys.readouterr().err


def test_support_bundle_interrupted_leaves_no_archive(
    instance: Instance, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(node: object) -> object:
        raise KeyboardInterrupt

    monkeypatch.setattr(support_bundle, "parts", interrupted)
    assert run_support_bundle(NodeSelection(instance.data_dir), tmp_path / "b") == 130
    assert not (tmp_path / "b").exists()


def test_masked_log_hostile_files_bounded(tmp_path: Path) -> None:
    path = tmp_path / "0.log"
    path.write_bytes(b"x" * (support_bundle.MAX_LOG_BYTES * 2) + b"end")
    assert len(masked_log(path)) <= support_bundle.MAX_LOG_BYTES + 1
    os.mkfifo(tmp_path / "1.log")
    with pytest.raises(OSError, match="not a file"):
        masked_log(tmp_path / "1.log")
