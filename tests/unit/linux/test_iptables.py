"""Taking a network out of the packet filter: decided from text, and done on a packet filter of its own."""

import subprocess
from pathlib import Path

import pytest

from pykubelet.linux.iptables import SHARED_CHAINS, chains_of, parse_save, plan_removal, rules_of

ID = "c0ec3eae66e0aaa6c088327d5282a50f19c3f1d0ef43a01ad0fd479e4eb5251c"


def rules(network: str, tag: str, port: int) -> str:
    """What bridge and portmap add for one pod."""
    label = rf'-m comment --comment "name: \"{network}\" id: \"{ID}\""'
    return (
        f"-A POSTROUTING -s 10.85.1.2/32 {label} -j CNI-{tag}0cfbce343b2b798f4e\n"
        f"-A CNI-{tag}0cfbce343b2b798f4e -d 10.85.1.0/24 {label} -j ACCEPT\n"
        f"-A CNI-{tag}0cfbce343b2b798f4e ! -d 224.0.0.0/4 {label} -j MASQUERADE\n"
        f"-A CNI-DN-{tag}0cfbce343b2b7 -s 10.85.1.0/24 -p tcp -m tcp --dport {port} -j CNI-HOSTPORT-SETMARK\n"
        f"-A CNI-DN-{tag}0cfbce343b2b7 -p tcp -m tcp --dport {port} -j DNAT --to-destination 10.85.1.2:80\n"
        rf'-A CNI-HOSTPORT-DNAT -p tcp -m comment --comment "dnat name: \"{network}\" id: \"{ID}\"" '
        f"-m multiport --dports {port} -j CNI-DN-{tag}0cfbce343b2b7\n"
    )


SHARED = """\
-A PREROUTING -m addrtype --dst-type LOCAL -j CNI-HOSTPORT-DNAT
-A OUTPUT -m addrtype --dst-type LOCAL -j CNI-HOSTPORT-DNAT
-A POSTROUTING -m comment --comment "CNI portfwd requiring masquerade" -j CNI-HOSTPORT-MASQ
-A CNI-HOSTPORT-MASQ -m mark --mark 0x2000/0x2000 -j MASQUERADE
-A CNI-HOSTPORT-SETMARK -m comment --comment "CNI portfwd masquerade mark" -j MARK --set-xmark 0x2000/0x2000
"""
STRANGER = "-A POSTROUTING -s 172.17.0.0/16 ! -o docker0 -j MASQUERADE\n"


def table(*parts: str) -> str:
    """A whole `iptables-save`, with a declaration for every chain that has rules."""
    body = "".join(parts)
    chains = dict.fromkeys(["PREROUTING", "INPUT", "OUTPUT", "POSTROUTING"])
    chains.update(dict.fromkeys(line.split()[1] for line in body.splitlines()))
    declared = "".join(
        f":{name} {'ACCEPT' if name.isupper() and '-' not in name else '-'} [0:0]\n" for name in chains
    )
    if "CNI-HOSTPORT-DNAT" in body and ":CNI-HOSTPORT-DNAT" not in declared:
        declared += ":CNI-HOSTPORT-DNAT - [0:0]\n"
    return f"# Generated\n*nat\n{declared}{body}COMMIT\n"


def test_plan_removal_no_own_rules_returns_empty_plan() -> None:
    assert plan_removal("", "net") == ""
    assert plan_removal(table(STRANGER), "net") == ""
    assert plan_removal(table(STRANGER, SHARED, rules("other", "aa", 80)), "net", keep_chains=[]) == ""
    assert plan_removal("garbage\n-A x\n:y\n", "net") == ""


def test_plan_removal_network_name_prefix_does_not_match() -> None:
    text = table(SHARED, rules("pykubelet-1234abcd", "aa", 80))
    assert rules_of(text, "pykubelet") == []
    assert plan_removal(text, "pykubelet", keep_chains=[]) == ""


def test_plan_removal_removes_own_rules_and_keeps_others() -> None:
    text = table(STRANGER, SHARED, rules("net", "aa", 80), rules("other", "bb", 81))
    plan = plan_removal(text, "net", keep_chains=[])
    assert "-X CNI-aa0cfbce343b2b798f4e" in plan
    assert "-X CNI-DN-aa0cfbce343b2b7" in plan
    assert "bb0cfb" not in plan
    assert "docker0" not in plan
    assert "-X CNI-HOSTPORT" not in plan, "the other network needs the shared chains"


@pytest.mark.parametrize("keep", [set(), SHARED_CHAINS])
def test_plan_removal_last_user_removes_shared_chains_unless_preexisting(keep: frozenset[str]) -> None:
    plan = plan_removal(table(STRANGER, SHARED, rules("net", "aa", 80)), "net", keep_chains=keep)
    for chain in SHARED_CHAINS:
        assert (f"-X {chain}" in plan) is (not keep)
    assert ("-D PREROUTING" in plan) is (not keep)


def test_plan_removal_own_rules_absent_removes_shared_chains() -> None:
    plan = plan_removal(table(SHARED), "net", keep_chains=[])
    assert plan.count("-X ") == 3


def test_plan_removal_unlabelled_chain_found_by_sandbox_id() -> None:
    # The name that the bridge plugin gave to this very sandbox.
    chain = "CNI-81817d0cfbce343b2b798f4e"
    assert chains_of("pykubelet-efc1cff0", [ID]) == {chain, "CNI-DN-81817d0cfbce343b2b798"}
    text = f"*nat\n:POSTROUTING ACCEPT [0:0]\n:{chain} - [0:0]\n:CNI-0123 - [0:0]\nCOMMIT\n"
    assert plan_removal(text, "pykubelet-efc1cff0") == ""
    plan = plan_removal(text, "pykubelet-efc1cff0", sandboxes=[ID])
    assert plan == f"*nat\n-F {chain}\n-X {chain}\nCOMMIT\n"


def test_plan_removal_foreign_jump_keeps_shared_chain() -> None:
    own = "-A MY-CHAIN -p tcp -j CNI-HOSTPORT-SETMARK\n"
    plan = plan_removal(table(SHARED, own), "net", keep_chains=[])
    assert "-X CNI-HOSTPORT-SETMARK" not in plan
    assert "-X CNI-HOSTPORT-MASQ" in plan


@pytest.mark.machine
def test_plan_removal_applied_by_iptables_restore_removes_rules(tmp_path: Path) -> None:
    before = table(STRANGER, SHARED, rules("net", "aa", 80), rules("other", "bb", 81))
    first = tmp_path / "first"
    second = tmp_path / "second"
    first.write_text(plan_removal(before, "net", keep_chains=[]))
    (tmp_path / "before").write_text(before)
    # A network namespace has a packet filter of its own.
    script = f"""
        set -e
        iptables-restore <{tmp_path}/before
        iptables-save >{tmp_path}/0
        iptables-restore --noflush <{first}
        iptables-save >{tmp_path}/1
    """
    subprocess.run(["unshare", "--net", "sh", "-c", script], check=True)
    after = (tmp_path / "1").read_text()
    assert rules_of(after, "net") == []
    assert len(rules_of(after, "other")) == 4
    second.write_text(plan_removal(after, "other", keep_chains=[]))
    script = f"""
        set -e
        iptables-restore <{tmp_path}/1
        iptables-restore --noflush <{second}
        iptables-save >{tmp_path}/2
    """
    subprocess.run(["unshare", "--net", "sh", "-c", script], check=True)
    (nat,) = parse_save((tmp_path / "2").read_text())
    assert nat.rules == [STRANGER.strip()]
    assert sorted(nat.chains) == ["INPUT", "OUTPUT", "POSTROUTING", "PREROUTING"]


def test_plan_removal_sweep_removes_empty_cni_chains() -> None:
    empty, busy, foreign = "CNI-" + "a" * 24, "CNI-" + "b" * 24, "CNI-KEEP"
    text = table(STRANGER, rules("other", "aa", 80), f"-A POSTROUTING -j {busy}\n")
    text = text.replace("*nat\n", f"*nat\n:{empty} - [0:0]\n:{busy} - [0:0]\n:{foreign} - [0:0]\n")
    assert plan_removal(text, "net") == ""
    assert plan_removal(text, "net", sweep=True) == f"*nat\n-F {empty}\n-X {empty}\nCOMMIT\n"
