"""Chains in the machine's packet filter that others rely on a node's agent for (`makeIPTablesUtilChains`).

The agent needs none of them itself. Components in containers look for `KUBE-IPTABLES-HINT` to learn which
of the two iptables this machine uses; `KUBE-FIREWALL` keeps packets for 127.0.0.0/8 out that did not come
from there, which a kernel that routes loopback would let in; and when somebody flushes the packet filter,
the canary is gone, by which the rest is noticed and made again. What is missing is decided from the text of
`iptables-save`, and added in one transaction per family; what is there is never touched.
"""

from __future__ import annotations

import asyncio
import itertools
import shutil

from pykubelet.host.iptables import Table, parse_save
from pykubelet.host.processes import CommandError, run, search_path
from pykubelet.logs import get_logger

log = get_logger(__name__)

HINT, FIREWALL, CANARY = "KUBE-IPTABLES-HINT", "KUBE-FIREWALL", "KUBE-KUBELET-CANARY"
CHECK_SECONDS = 60.0
PROGRAMS = ("iptables", "ip6tables")

_FIRST_TRIES = 3
_COMMENT = "block incoming localnet connections"
_MARTIANS = (
    f"-A {FIREWALL} ! -s 127.0.0.0/8 -d 127.0.0.0/8 -m comment --comment "
    f'"{_COMMENT}" -m conntrack ! --ctstate RELATED,ESTABLISHED,DNAT -j DROP'
)


def plan_chains(text: str, *, ipv6: bool = False) -> str:
    """Say what `iptables-restore --noflush` shall add to the packet filter whose `iptables-save` is `text`.

    Empty when nothing is missing. Only IPv4 has martian packets to keep out.
    """
    tables = {table.name: table for table in parse_save(text)}
    wanted = {"mangle": [HINT, CANARY], "nat": [CANARY], "filter": [CANARY] if ipv6 else [CANARY, FIREWALL]}
    blocks = []
    for name, chains in wanted.items():
        table = tables.get(name, Table(name))
        # A chain that is named here anew would be emptied.
        lines = [f":{chain} - [0:0]" for chain in chains if chain not in table.chains]
        if FIREWALL in chains:
            lines += _missing_rules(table.rules)
        if lines:
            blocks.append("\n".join([f"*{name}", *lines, "COMMIT", ""]))
    return "".join(blocks)


async def ensure_chains(program: str = "iptables") -> None:
    """Have the chains of one family; raises CommandError."""
    if plan := plan_chains(await run(f"{program}-save"), ipv6=program == "ip6tables"):
        await run(f"{program}-restore", "--noflush", "--wait", "5", input=plan.encode())


async def keep_chains(program: str, every: float = CHECK_SECONDS) -> None:
    """Have the chains of one family, and have them again when they were flushed; for ever.

    Returns where there is no such packet filter: then there is nobody who would need them. One that only
    fails is tried a few times: while a machine boots others hold its lock for long.
    """
    for tries in itertools.count(1):
        try:
            await ensure_chains(program)
            break
        except CommandError as err:
            missing = shutil.which(f"{program}-save", path=search_path()) is None
            if missing or tries == _FIRST_TRIES:
                log.info(
                    "No iptables chains for other components on this machine", program=program, why=str(err)
                )
                return
            log.v(2).info("Could not have iptables chains yet", program=program, why=str(err))
            await asyncio.sleep(every)
    log.info("Initialized iptables rules", program=program)
    while True:
        await asyncio.sleep(every)
        try:
            if not await _canary_lives(program):
                log.v(2).info("Reloading after iptables flush", program=program)
                await ensure_chains(program)
        except CommandError as err:
            log.error(err, "Could not have iptables chains again; will be tried again", program=program)


async def _canary_lives(program: str) -> bool:
    try:
        await run(program, "--wait", "5", "-t", "mangle", "-S", CANARY)
    except CommandError:
        return False
    return True


def _missing_rules(rules: list[str]) -> list[str]:
    jumps = [f"{chain} -j {FIREWALL}" for chain in ("OUTPUT", "INPUT")]
    missing = [f"-I {jump}" for jump in jumps if f"-A {jump}" not in rules]
    if not any(rule.startswith(f"-A {FIREWALL} ") and _COMMENT in rule for rule in rules):
        missing.append(_MARTIANS)
    return missing
