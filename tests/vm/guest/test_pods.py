"""Real pods of a real agent on cgroup v2: what is in their cgroups, with either driver."""

import csv
import subprocess
from collections.abc import Callable
from pathlib import Path

from tests.support.manifests import Document, container, pod
from tests.support.node import status_of
from tests.vm.guest.node import PIDS, SLOW, GuestNode, meminfo, value

TABLE = Path(__file__).with_name("pods.tsv")
FILES = ("cpu.weight", "cpu.max", "memory.max", "memory.min", "memory.low", "hugetlb.2MB.max")
PAGE = 4096

Row = dict[str, str]


def rows() -> list[Row]:
    with TABLE.open() as file:
        return list(csv.DictReader(file, delimiter="\t"))


def document(row: Row) -> Document:
    """The pod of a row. One that "waits" has a cgroup and no containers: its volume never comes.

    Those that run need a processor or so: what starts a container counts as the pod's, and is slow here.
    """
    spec: Document = {"hostNetwork": True}
    containers: dict[str, list[Document]] = {"": [], "init": [], "pod": []}
    for number, part in enumerate(row["parts"].split("; ")):
        kind, *amounts = part.split() if part.startswith(("init ", "pod ")) else ("", *part.split())
        resources: Document = {}
        for amount in amounts:
            if amount != "-":
                name, _, both = amount.partition("=")
                for side, text in zip(("requests", "limits"), both.split(":"), strict=True):
                    if text:
                        resources.setdefault(side, {})[name] = text
        containers[kind].append(container(f"c{number}", resources=resources))
    if containers["init"]:
        spec["initContainers"] = containers["init"]
    if containers["pod"]:
        spec["resources"] = containers["pod"][0]["resources"]
    if row["does"] == "waits":
        # Only what a container mounts is waited for.
        containers[""][0]["volumeMounts"] = [{"name": "never", "mountPath": "/never"}]
        spec["volumes"] = [{"name": "never", "hostPath": {"path": "/never/comes", "type": "Directory"}}]
    return pod(row["name"], *containers[""], **spec)


def expected(row: Row, driver: str) -> dict[str, str]:
    limits = {file: row[file] for file in FILES} | {"pids.max": str(PIDS)}
    if driver == "systemd":
        limits["cpu.max"] = row["cpu.max.systemd"]
    return limits


def differences(node: GuestNode, table: list[Row]) -> list[str]:
    """Where the machine differs from the table, one line each."""
    found = []
    for row in table:
        told = node.pod(f"{row['name']}-n1")
        if told is None or "qosClass" not in told["status"]:
            found.append(f"{row['name']} is not there")
            continue
        folder = node.pod_place(told["metadata"]["uid"], told["status"]["qosClass"])
        for file, wanted in expected(row, node.driver).items():
            actual = value(folder, file) if (folder / file).exists() else "(missing)"
            if actual != wanted:
                found.append(f"{row['name']} {file}: {actual}, not {wanted}")
    return found


def tier_differences(node: GuestNode, table: list[Row]) -> list[str]:
    """The same for the cgroups above the pods; the sums are of the table."""
    low = sum(int(row["memory.low"]) for row in table)
    minimum = sum(int(row["memory.min"]) for row in table)
    # Two amounts of the table are not whole pages: together they make one more.
    wanted = {
        ("kubepods", "cpu.weight"): "79",
        ("kubepods", "memory.max"): str(meminfo("MemTotal")),
        ("kubepods", "cpuset.cpus"): "0-1",
        ("kubepods/burstable", "cpu.weight"): "17",
        ("kubepods/burstable", "memory.low"): str(low),
        ("kubepods/burstable", "memory.max"): "max",
        ("kubepods/besteffort", "cpu.weight"): "1",
        ("kubepods/besteffort", "memory.max"): "max",
    }
    found = []
    for (name, file), text in wanted.items():
        actual = value(node.place(*name.split("/")), file)
        if actual != text:
            found.append(f"{name} {file}: {actual}, not {text}")
    protected = int(value(node.place("kubepods"), "memory.min"))
    if not minimum + low <= protected < minimum + low + 2 * PAGE:
        found.append(f"kubepods memory.min: {protected}, not {minimum + low}")
    return found


def settle(node: GuestNode, look: Callable[[GuestNode, list[Row]], list[str]], table: list[Row]) -> None:
    """Wait until nothing differs any more; a failure says what does."""
    try:
        node.wait("everything to be as in the table", lambda: not look(node, table), SLOW)
    except AssertionError as err:
        raise AssertionError("\n".join([*look(node, table), str(err)])) from None


def test_pod_cgroups_kubelet_restarted_match_table_and_are_removed(node: GuestNode) -> None:
    """Thirty pods have what the table says, also after a kill; when they are gone nothing is left."""
    table = rows()
    assert len(table) >= 30
    try:
        _expect_table(node, table)
    finally:
        # Whatever went wrong, the next tests need the room.
        node.clear(SLOW)
    assert node.pod_cgroups() == []
    own = node.instance.cgroup_root.strip("/").replace("-", "_") + ".slice"
    stay = (own, "kubepods.slice", "burstable.slice", "besteffort.slice")
    # systemd forgets a unit a moment after its cgroup is gone.
    node.wait(
        "systemd to forget the pods' units",
        lambda: not [unit for unit in node.units() if not unit.endswith(stay)],
        SLOW,
    )


def _expect_table(node: GuestNode, table: list[Row]) -> None:
    for row in table:
        node.write(document(row))
    settle(node, differences, table)
    settle(node, tier_differences, table)
    for row in table:
        if row["does"] == "runs":
            node.wait_ready(f"{row['name']}-n1", SLOW)
    if node.driver == "systemd":
        # What systemd believes is what it would set again.
        subprocess.run(["systemctl", "daemon-reload"], check=True)
        assert len([unit for unit in node.units() if "pod" in unit.rpartition("kubepods")[2]]) >= len(table)
    assert differences(node, table) == []
    containers = {one.id for one in node.truth.running()}

    node.kill()
    # What changed concurrently is put right, too.
    victim = node.place("kubepods", "burstable")
    (victim / "cpu.weight").write_text("100")
    node.start()
    settle(node, tier_differences, table)
    # A new agent tells of its pods one after the other.
    settle(node, differences, table)
    assert {one.id for one in node.truth.running()} == containers, "nothing was restarted"


def test_container_cgroup_has_memory_protection_throttling_and_swap_limit(node: GuestNode) -> None:
    """What the runtime was told for a container: protection, throttling, swap."""
    burst = container(resources={"requests": {"cpu": "50m", "memory": "64Mi"}, "limits": {"memory": "128Mi"}})
    sure = container(resources={"limits": {"cpu": "1", "memory": "32Mi"}})
    names = [node.write(pod(name, one, hostNetwork=True)) for name, one in (("burst", burst), ("sure", sure))]
    for name in names:
        node.wait_ready(name, SLOW)
    try:
        _expect_limits(node, names)
    finally:
        node.remove(*names)


def _expect_limits(node: GuestNode, names: list[str]) -> None:
    # Static pods count as critical, which never swap, whatever the machine has (others: test_swap.py).
    assert meminfo("SwapTotal") > 0
    files = ("cpu.weight", "memory.max", "memory.min", "memory.low", "memory.high", "memory.swap.max")
    assert [value(node.container_place(names[0]), file) for file in files] == [
        *("2", str(128 << 20), "0", str(64 << 20)),
        str(int((64 << 20) + (64 << 20) * 0.9) // PAGE * PAGE),
        "0",
    ]
    assert [value(node.container_place(names[1]), file) for file in files] == [
        *("39", str(32 << 20), str(32 << 20), "0", "max", "0"),
    ]
    assert value(node.container_place(names[1]), "cpu.max") == "100000 100000"
    assert value(node.container_place(names[1]), "memory.oom.group") == "1"


def test_container_exceeds_memory_limit_is_oom_killed(node: GuestNode) -> None:
    greedy = container(
        command=["sh", "-c", "tail /dev/zero"], resources={"limits": {"cpu": "1", "memory": "32Mi"}}
    )
    name = node.write(pod("greedy", greedy, restartPolicy="Never", hostNetwork=True))
    try:
        ended = status_of(node.wait_phase(name, "Failed", SLOW), "main")["state"]["terminated"]
        assert (ended["reason"], ended["exitCode"]) == ("OOMKilled", 137)
    finally:
        node.remove(name)


def test_pod_cgroups_pods_removed_leave_nothing(node: GuestNode) -> None:
    node.clear(SLOW)
    assert node.pod_cgroups() == []
