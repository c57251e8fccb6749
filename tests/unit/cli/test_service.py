"""`pykubelet up --install` with a recorded systemctl."""

from pathlib import Path

import pytest

from pykubelet.cli.node import service, up
from pykubelet.cli.node.service import PATH_FLAGS, quoted, run_install, run_uninstall, unit_text
from pykubelet.config.flags.flag_table import BY_NAME
from pykubelet.linux.port_owner import PortOwner
from pykubelet.standalone.data_dir import claim, hold_lock
from pykubelet.standalone.instance import Instance


@pytest.fixture
def calls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, ...]]:
    """A host with systemd: unit files in tmp_path, and the calls of systemctl."""
    made: list[tuple[str, ...]] = []
    for name in ("units", "run"):
        (tmp_path / name).mkdir()
    monkeypatch.setattr(service, "UNITS", tmp_path / "units")
    monkeypatch.setattr(service, "RUNNING_SYSTEMD", tmp_path / "run")
    monkeypatch.setattr(service, "is_root", lambda: True)
    monkeypatch.setattr(up, "is_root", lambda: True)
    monkeypatch.setattr(up, "find_port_owner", lambda port: None)
    monkeypatch.setattr(service, "_is_active", lambda name: False)
    monkeypatch.setattr(service, "_systemctl", lambda *arguments: made.append(arguments))
    return made


def test_install_twice_starts_and_changes_nothing_then_restarts_for_new_flags(
    data_dir: Path, tmp_path: Path, calls: list[tuple[str, ...]], capsys: pytest.CaptureFixture[str]
) -> None:
    name = f"{Instance.at(data_dir).name}.service"
    unit = tmp_path / "units" / name
    assert run_install(data_dir, "unix:///run/x.sock", 3, ["--max-pods=9"]) == 0
    text = unit.read_text()
    assert (
        f"up --data-dir {data_dir} --container-runtime-endpoint unix:///run/x.sock -v 3 --max-pods=9" in text
    )
    assert "KillMode=process\n" in text
    assert calls == [("daemon-reload",), ("enable", name), ("restart", name)]
    calls.clear()
    assert run_install(data_dir, "unix:///run/x.sock", 3, ["--max-pods=9"]) == 0
    assert calls[-1] == ("start", name)
    assert run_install(data_dir, None, 0, []) == 0
    assert calls[-1] == ("restart", name)
    assert run_uninstall(data_dir) == 0
    assert ("disable", "--now", name) in calls
    assert not unit.exists()
    assert run_uninstall(data_dir) == 0
    assert "No service" in capsys.readouterr().out


def test_unit_restarts_as_that_of_the_package() -> None:
    """Verify that systemd does not start the node again that `pykubelet down` has stopped (exit code 0)."""
    packaged = (Path(__file__).parents[3] / "packaging/deb/pykubelet.service").read_text().splitlines()
    lines = unit_text(["pykubelet", "up"]).splitlines()
    for line in ("Restart=on-failure", "StartLimitIntervalSec=0", "KillMode=process", "Delegate=yes"):
        assert line in packaged
        assert line in lines


def test_install_problems_one_line_and_nothing_written(
    data_dir: Path,
    tmp_path: Path,
    calls: list[tuple[str, ...]],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    units, instance = tmp_path / "units", Instance.at(data_dir)
    for flags, text in ((["--max-pods=x"], "max-pods"), (["--node-labels=a\n=b"], "")):
        assert run_install(data_dir, None, 0, flags) == 1
        assert text in capsys.readouterr().err
    claim(instance)
    with hold_lock(instance, "up"):
        assert run_install(data_dir, None, 0, []) == 1
    assert "stop it with Ctrl-C first" in capsys.readouterr().err
    assert list(units.iterdir()) == []
    unit = units / f"{instance.name}.service"
    unit.write_text("[Unit]\n")
    assert (run_install(data_dir, None, 0, []), run_uninstall(data_dir)) == (1, 1)
    assert capsys.readouterr().err.count("was not written by pykubelet") == 2
    assert unit.read_text() == "[Unit]\n"
    (tmp_path / "run").rmdir()
    assert (run_install(data_dir, None, 0, []), run_uninstall(data_dir)) == (1, 1)
    assert capsys.readouterr().err.count("does not run systemd") == 2
    monkeypatch.setattr(service, "is_root", lambda: False)
    assert run_install(data_dir, None, 0, []) == 1
    assert "sudo" in capsys.readouterr().err
    assert calls == []


def test_install_taken_port_is_a_problem_unless_the_service_has_it(
    data_dir: Path,
    tmp_path: Path,
    calls: list[tuple[str, ...]],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    owner = PortOwner(10250, "127.0.0.1", 7, "kubelet")
    monkeypatch.setattr(up, "find_port_owner", lambda port: owner if port == 10250 else None)
    assert run_install(data_dir, None, 0, []) == 1
    assert "port 10250 of the API server is taken by pid 7 (kubelet)" in capsys.readouterr().err
    assert (list((tmp_path / "units").iterdir()), calls) == ([], [])
    monkeypatch.setattr(service, "_is_active", lambda name: True)
    assert run_install(data_dir, None, 0, []) == 0


def test_install_relative_paths_of_flags_become_absolute(
    data_dir: Path, tmp_path: Path, calls: list[tuple[str, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    flags = [
        "--resolv-conf",
        "r.conf",
        "--log-file=/l",
        "--runonce",
        "--volume-plugin-dir=a/b",
        "--node-labels=a=b",
    ]
    assert run_install(data_dir, None, 0, flags) == 0
    text = (tmp_path / "units" / f"{Instance.at(data_dir).name}.service").read_text()
    assert (
        f"--resolv-conf={tmp_path}/r.conf --log-file=/l --runonce=true "
        f"--volume-plugin-dir={tmp_path}/a/b --node-labels=a=b\n"
    ) in text


def test_path_flags_exist() -> None:
    assert BY_NAME.keys() >= PATH_FLAGS


@pytest.mark.parametrize(
    ("word", "text"),
    [
        ("plain", "plain"),
        ("a b", '"a b"'),
        ("50%", "50%%"),
        ("$x", "$$x"),
        ('say "x"', '"say \\"x\\""'),
        ("", '""'),
        ("it's", '"it\'s"'),
    ],
)
def test_quoted_word_for_exec_start(word: str, text: str) -> None:
    assert quoted(word) == text
    assert f"ExecStart={text}\n" in unit_text([word])


def test_down_names_service_that_stays_enabled(
    data_dir: Path,
    tmp_path: Path,
    calls: list[tuple[str, ...]],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def nothing_left(*_: object, **__: object) -> list[str]:
        return []

    monkeypatch.setattr(up, "down", nothing_left)
    monkeypatch.setattr(up, "configure_early", lambda: None)
    unit = tmp_path / "units" / f"{Instance.at(data_dir).name}.service"
    link = tmp_path / "units" / "multi-user.target.wants" / unit.name
    link.parent.mkdir()

    def output() -> str:
        assert up.run_down(data_dir) == 0
        return capsys.readouterr().out

    assert output() == "Nothing is left.\n"
    assert run_install(data_dir, "unix:///run/x.sock", 0, []) == 0
    link.symlink_to(unit)
    capsys.readouterr()
    expected = f"{unit.name} is still enabled and starts a new node at the next boot: "
    assert f"{expected}`pykubelet up --uninstall --data-dir {data_dir}` prevents it\n" in output()
    unit.write_text("[Unit]\n")
    assert f"{expected}`systemctl disable {unit.name}` prevents it\n" in output()
    link.unlink()
    assert output() == "Nothing is left.\n"
