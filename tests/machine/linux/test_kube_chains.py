"""The chains that others rely on, in a network namespace of the test's own."""

import asyncio
import os
import shutil
import subprocess
import sys

import pytest

from pykubelet.linux import iptables as kube_chains
from pykubelet.linux.iptables import CANARY, FIREWALL, HINT, parse_save, plan_chains
from pykubelet.linux.processes import CommandError

NOTHING = "*mangle\n:INPUT ACCEPT [0:0]\nCOMMIT\n"
RULE = (
    f"-A {FIREWALL} ! -s 127.0.0.0/8 -d 127.0.0.0/8 -m comment --comment "
    '"block incoming localnet connections" -m conntrack ! --ctstate RELATED,ESTABLISHED,DNAT -j DROP'
)


def test_plan_chains_empty_filter_adds_all() -> None:
    found = {table.name: table for table in parse_save(plan_chains(NOTHING))}
    assert found["mangle"].chains == [HINT, CANARY]
    assert found["nat"].chains == [CANARY]
    assert found["filter"].chains == [CANARY, FIREWALL]
    assert found["filter"].rules == [RULE]


def test_plan_chains_existing_chains_are_untouched() -> None:
    text = plan_chains(NOTHING).replace("-I ", "-A ")
    assert plan_chains(text) == ""
    # Somebody else's rules in our chain stay, and one of ours that is gone comes back alone.
    text = text.replace(RULE, f"-A {FIREWALL} -j RETURN").replace(f":{HINT} - [0:0]\n", "")
    assert plan_chains(text) == f"*mangle\n:{HINT} - [0:0]\nCOMMIT\n*filter\n{RULE}\nCOMMIT\n"


def test_plan_chains_ipv6_has_no_firewall_chain() -> None:
    assert FIREWALL not in plan_chains(NOTHING, ipv6=True)
    assert plan_chains(plan_chains(NOTHING, ipv6=True), ipv6=True) == ""


SCRIPT = """
import asyncio, subprocess
from pykubelet.linux.iptables import keep_chains

def save():
    text = subprocess.run(["iptables-save"], check=True, capture_output=True, text=True).stdout
    return sorted(line.split(" [")[0] for line in text.splitlines() if "KUBE-" in line)

async def wait_until(done):
    async with asyncio.timeout(60):
        while not done():
            await asyncio.sleep(0.05)

async def main():
    task = asyncio.ensure_future(keep_chains("iptables", every=0.2))
    await wait_until(lambda: len(save()) >= 8)
    first = save()
    for table in ("filter", "nat", "mangle"):
        for what in ("-F", "-X"):
            subprocess.run(["iptables", "-w", "-t", table, what], check=True)
    await wait_until(lambda: save() == first)
    task.cancel()
    print("\\n".join(first))

asyncio.run(main())
"""


@pytest.mark.machine
@pytest.mark.skipif(
    os.geteuid() != 0 or shutil.which("iptables-restore") is None, reason="needs root and iptables"
)
def test_keep_chains_after_flush_restores_chains() -> None:
    command = ["unshare", "--net", sys.executable, "-c", SCRIPT]
    done = subprocess.run(command, capture_output=True, text=True, timeout=90, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == sorted(
        [
            f"-A INPUT -j {FIREWALL}",
            RULE,
            f"-A OUTPUT -j {FIREWALL}",
            f":{FIREWALL} -",
            f":{HINT} -",
            *[f":{CANARY} -"] * 3,
        ]
    )


@pytest.mark.machine
def test_keep_chains_iptables_missing_returns() -> None:
    script = (
        "import asyncio; from pykubelet.linux.iptables import keep_chains; "
        "print(asyncio.run(keep_chains('no-such-iptables')))"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout == "None\n"


@pytest.mark.looptime
@pytest.mark.parametrize(("failing", "tries"), [(2, 3), (9, 3)])
async def test_keep_chains_filter_busy_is_retried_then_abandoned(
    failing: int, tries: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []

    async def ensure(program: str) -> None:
        asked.append(program)
        if len(asked) <= failing:
            raise CommandError("somebody holds the lock")

    async def lives(program: str) -> bool:
        return True

    monkeypatch.setattr(shutil, "which", lambda *_, **__: "/sbin/iptables-save")
    monkeypatch.setattr(kube_chains, "ensure_chains", ensure)
    monkeypatch.setattr(kube_chains, "_canary_lives", lives)
    keeping = asyncio.create_task(kube_chains.keep_chains("iptables"))
    await asyncio.sleep(10 * kube_chains.CHECK_SECONDS)
    assert len(asked) == tries
    # It goes on where it has succeeded in the end, and gives up where it has not.
    assert keeping.done() == (failing > tries)
    keeping.cancel()
