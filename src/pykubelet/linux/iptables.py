"""iptables: removal of a CNI network's rules, and the chains that the kubelet maintains for other components.

The CNI plugins `bridge` and `portmap` put the network's name into a comment of each rule, so that the rules
of a network can be found and removed even if the plugins are not available any more. The rules to remove are
computed from `iptables-save`, and removed in one transaction, so that no chain is left without the jump that
identifies its network.

With `makeIPTablesUtilChains` the kubelet maintains chains that it does not use itself. Components in
containers look for `KUBE-IPTABLES-HINT` to detect the iptables variant (legacy or nft) of the host;
`KUBE-FIREWALL` drops packets to 127.0.0.0/8 from other sources, which a kernel that routes loopback addresses
would accept; the canary chain detects a flush, after which all chains are recreated. Missing chains and rules
are computed from `iptables-save` and added in one transaction per address family; existing ones are never
changed.
"""

from __future__ import annotations

import asyncio
import hashlib
import itertools
import re
import shutil
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field

from pykubelet.linux.processes import CommandError, run, search_path
from pykubelet.logs import get_logger

log = get_logger(__name__)
SHARED_CHAINS = frozenset({"CNI-HOSTPORT-DNAT", "CNI-HOSTPORT-MASQ", "CNI-HOSTPORT-SETMARK"})
"""Chains that `portmap` creates once and that all networks of the host share."""
_OWN_CHAIN = re.compile(r"CNI-(DN-)?[0-9a-f]+")
_FULL_NAME = re.compile(r"CNI-(?:[0-9a-f]{24}|DN-[0-9a-f]{21})")
_CHAIN_LENGTH = 28
"""Length of the plugins' chain names, which is the kernel's limit."""
_PROGRAMS = ("iptables", "ip6tables")


@dataclass(slots=True)
class Table:
    """One table of iptables."""

    name: str
    chains: list[str] = field(default_factory=list)
    rules: list[str] = field(default_factory=list)
    """Rules as `iptables-save` writes them: `-A CHAIN …`."""


def parse_save(text: str) -> list[Table]:
    """Parse the output of `iptables-save`."""
    tables: list[Table] = []
    for line in text.splitlines():
        if line.startswith("*"):
            tables.append(Table(line[1:].strip()))
        elif line.startswith(":") and tables:
            tables[-1].chains.append(line[1:].split(" ", 1)[0])
        elif line.startswith("-A ") and tables:
            tables[-1].rules.append(line)
    return tables


def rules_of(text: str, network: str) -> list[str]:
    """Return the rules with this network's name in their comment."""
    return [rule for table in parse_save(text) for rule in table.rules if _is_labelled(rule, network)]


def chains_of(network: str, sandboxes: Iterable[str]) -> set[str]:
    """Return the names that the plugins derive for the chains of these sandboxes.

    A plugin that is killed midway can leave an empty chain, which has no comment to find it by.
    """
    digests = [hashlib.sha512(f"{network}{sandbox}".encode()).hexdigest() for sandbox in sandboxes]
    return {f"{prefix}{digest}"[:_CHAIN_LENGTH] for digest in digests for prefix in ("CNI-", "CNI-DN-")}


def plan_removal(
    text: str,
    network: str,
    *,
    sandboxes: Iterable[str] = (),
    keep_chains: Collection[str] = SHARED_CHAINS,
    sweep: bool = False,
) -> str:
    """Compute how to remove a network from the packet filter whose `iptables-save` is `text`.

    Returns the input of `iptables-restore --noflush`; empty if there is nothing to remove. Shared chains that
    are not in `keep_chains` are removed as well if no other network uses them. With `sweep`, so are the
    plugins' empty chains without a jump to them: when a plugin is killed, the `iptables` process that it
    started still creates its chain, after everything else was cleaned up.
    """
    blocks = []
    for table in parse_save(text):
        known = chains_of(network, sandboxes) | (_abandoned(table) if sweep else set())
        blocks.append(_plan_table(table, network, known, frozenset(keep_chains)))
    return "".join(block for block in blocks if block)


async def save(program: str = "iptables") -> str:
    """Return the output of `iptables-save`; empty if the command or its kernel support is missing."""
    try:
        return await run(f"{program}-save")
    except CommandError:
        return ""


async def shared_chains_present() -> set[str]:
    """Return the shared chains that exist."""
    found: set[str] = set()
    for program in _PROGRAMS:
        for table in parse_save(await save(program)):
            found.update(SHARED_CHAINS.intersection(table.chains))
    return found


async def network_traces(network: str, sandboxes: Iterable[str] = ()) -> list[str]:
    """Return the existing rules of a network, and the existing chains of its sandboxes."""
    known, found = chains_of(network, sandboxes), []
    for program in _PROGRAMS:
        text = await save(program)
        found += rules_of(text, network)
        found += [f"chain {name}" for table in parse_save(text) for name in table.chains if name in known]
    return found


async def remove_network(
    network: str,
    *,
    sandboxes: Collection[str] = (),
    keep_chains: Collection[str] = SHARED_CHAINS,
    sweep: bool = False,
) -> None:
    """Remove a network's IPv4 and IPv6 rules and chains; see `plan_removal`.

    Raises CommandError if another process keeps changing the same rules.
    """
    for program in _PROGRAMS:
        for attempt in range(5):
            text = await save(program)
            plan = plan_removal(text, network, sandboxes=sandboxes, keep_chains=keep_chains, sweep=sweep)
            if not plan:
                break
            try:
                await run(f"{program}-restore", "--noflush", "--wait", "5", input=plan.encode())
            except CommandError:
                # A plugin may have removed the same rules since they were listed.
                if attempt == 4:
                    raise


def _abandoned(table: Table) -> set[str]:
    used = {_chain(rule) for rule in table.rules} | {_target(rule) for rule in table.rules}
    return {name for name in table.chains if _FULL_NAME.fullmatch(name) and name not in used}


def _is_labelled(rule: str, network: str) -> bool:
    return rf"name: \"{network}\" id: \"" in rule


def _chain(rule: str) -> str:
    return rule.split(" ", 2)[1]


def _target(rule: str) -> str:
    words = rule.rsplit(" -j ", 1)
    return words[1].split(" ", 1)[0] if len(words) == 2 else ""


def _plan_table(table: Table, network: str, known: set[str], keep: frozenset[str]) -> str:
    labelled = [rule for rule in table.rules if _is_labelled(rule, network)]
    candidates = {_chain(rule) for rule in labelled} | {_target(rule) for rule in labelled}
    chains_to_remove = {name for name in candidates if _OWN_CHAIN.fullmatch(name)} | known
    chains_to_remove &= set(table.chains)
    deletions = [rule for rule in table.rules if rule in labelled or _target(rule) in chains_to_remove]
    deletions = [rule for rule in deletions if _chain(rule) not in chains_to_remove]
    remaining = [
        rule for rule in table.rules if _chain(rule) not in chains_to_remove and rule not in deletions
    ]
    unused = _unused_shared(table, remaining, keep)
    deletions += [rule for rule in remaining if _target(rule) in unused and _chain(rule) not in unused]
    chains_to_remove |= unused
    if not chains_to_remove and not deletions:
        return ""
    lines = [f"*{table.name}"]
    lines += ["-D " + rule.removeprefix("-A ") for rule in deletions]
    # All are flushed before any is deleted: a chain with a jump to it cannot be deleted.
    lines += [f"-F {name}" for name in sorted(chains_to_remove)]
    lines += [f"-X {name}" for name in sorted(chains_to_remove)]
    return "\n".join([*lines, "COMMIT", ""])


def _unused_shared(table: Table, remaining: list[str], keep: frozenset[str]) -> set[str]:
    """Return the shared chains that are unused: no host port is left, and no other chain jumps to them."""
    present = SHARED_CHAINS.intersection(table.chains)
    if any(_chain(rule) == "CNI-HOSTPORT-DNAT" for rule in remaining):
        return set()
    builtin = {"PREROUTING", "OUTPUT", "POSTROUTING"}
    foreign_targets = {_target(rule) for rule in remaining if _chain(rule) not in builtin | SHARED_CHAINS}
    return {name for name in present if name not in keep and name not in foreign_targets}


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
    """Return the input of `iptables-restore --noflush` that adds what is missing in `text` (`iptables-save`).

    Empty if nothing is missing. Only IPv4 needs the rule that drops martian packets.
    """
    tables = {table.name: table for table in parse_save(text)}
    desired_chains = {
        "mangle": [HINT, CANARY],
        "nat": [CANARY],
        "filter": [CANARY] if ipv6 else [CANARY, FIREWALL],
    }
    blocks = []
    for name, chains in desired_chains.items():
        table = tables.get(name, Table(name))
        # iptables-restore would flush an existing chain that is declared again.
        lines = [f":{chain} - [0:0]" for chain in chains if chain not in table.chains]
        if FIREWALL in chains:
            lines += _missing_rules(table.rules)
        if lines:
            blocks.append("\n".join([f"*{name}", *lines, "COMMIT", ""]))
    return "".join(blocks)


async def ensure_chains(program: str = "iptables") -> None:
    """Ensure that the chains of one address family exist. Raises CommandError."""
    if plan := plan_chains(await run(f"{program}-save"), ipv6=program == "ip6tables"):
        await run(f"{program}-restore", "--noflush", "--wait", "5", input=plan.encode())


async def keep_chains(program: str, every: float = CHECK_SECONDS) -> None:
    """Ensure that the chains of one address family exist, and recreate them after a flush, until cancelled.

    Checks every `every` seconds. Returns if the host does not have this packet filter: no component can need
    the chains then. A failing one is tried three times: while a host boots, other processes hold the lock for
    long.
    """
    for tries in itertools.count(1):
        try:
            await ensure_chains(program)
            break
        except CommandError as err:
            missing = shutil.which(f"{program}-save", path=search_path()) is None
            if missing or tries == _FIRST_TRIES:
                log.info("Failed to create iptables chains, giving up", program=program, err=str(err))
                return
            log.v(2).info("Failed to create iptables chains, retrying", program=program, err=str(err))
            await asyncio.sleep(every)
    log.info("Initialized iptables rules", program=program)
    while True:
        await asyncio.sleep(every)
        try:
            if not await _canary_lives(program):
                log.v(2).info("Reloading after iptables flush", program=program)
                await ensure_chains(program)
        except CommandError as err:
            log.error(err, "Failed to restore iptables chains, retrying", program=program)


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
