import gzip
import os
from pathlib import Path

import pytest

from pykubelet.linux.kernel import (
    FEATURES,
    KERNEL_DEFAULTS,
    NAMESPACES,
    Feature,
    KernelFacts,
    feature_state,
    kernel_default_differences,
    parse_config,
    parse_filesystems,
    parse_module_list,
    parse_release,
    read_kernel,
    read_sysctl,
)

BY_NAME = {feature.name: feature for feature in FEATURES}


@pytest.mark.parametrize(
    ("release", "numbers"),
    [("6.18.44-fc-v445", (6, 18, 44)), ("5.10.0-28-amd64", (5, 10, 0)), ("6.4", (6, 4)), ("4.19+", (4, 19))],
)
def test_parse_release_returns_version_numbers(release: str, numbers: tuple[int, ...]) -> None:
    assert parse_release(release) == numbers


def test_parse_release_without_numbers_raises() -> None:
    with pytest.raises(ValueError, match="not a kernel release"):
        parse_release("linux")


def test_parse_config_filesystems_and_modules_return_entries() -> None:
    config = parse_config('# CONFIG_A is not set\nCONFIG_B=y\nCONFIG_C=m\nCONFIG_D="x=y"\n\n')
    assert config == {"CONFIG_B": "y", "CONFIG_C": "m", "CONFIG_D": "x=y"}
    assert parse_filesystems("nodev\tproc\n\text4\n\n") == {"proc", "ext4"}
    lists = [
        "kernel/fs/overlayfs/overlay.ko\n",
        "kernel/net/br-nf.ko.xz: kernel/net/x.ko.xz\nkernel/v.ko.zst:\n",
    ]
    assert parse_module_list(lists) == {"overlay", "br_nf", "v"}


@pytest.mark.parametrize(
    ("feature", "facts", "state"),
    [
        ("overlayfs", KernelFacts("6", present=frozenset({"overlay"})), True),
        ("overlayfs", KernelFacts("6", config={"CONFIG_OVERLAY_FS": "m"}), True),
        ("overlayfs", KernelFacts("6", config={}), False),
        ("overlayfs", KernelFacts("6", modules_known=True), False),
        ("overlayfs", KernelFacts("6"), None),
        ("veth", KernelFacts("6", config={"CONFIG_VETH": "y"}), True),
        ("br_netfilter", KernelFacts("6", bridge_netfilter_active=True, config={}), True),
        ("seccomp", KernelFacts("6", seccomp=True), True),
        ("seccomp", KernelFacts("6", modules_known=True), None),
        ("seccomp", KernelFacts("6", config={"CONFIG_SECCOMP": "y"}), False),
        ("user namespaces", KernelFacts("6", namespaces=NAMESPACES, max_user_namespaces=9), True),
        ("user namespaces", KernelFacts("6", namespaces=NAMESPACES, config={"CONFIG_USER_NS": "y"}), False),
    ],
)
def test_feature_state_follows_kernel_facts(feature: str, facts: KernelFacts, state: bool | None) -> None:
    assert feature_state(BY_NAME[feature], facts) is state


def test_kernel_default_differences_returns_mismatches(tmp_path: Path) -> None:
    for name, value in KERNEL_DEFAULTS.items():
        file = tmp_path / "sys" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(f"{value}\n")
    assert kernel_default_differences(tmp_path) == {}
    (tmp_path / "sys/vm/overcommit_memory").write_text("0\n")
    (tmp_path / "sys/kernel/panic").unlink()
    assert kernel_default_differences(tmp_path) == {
        "vm/overcommit_memory": (1, 0),
        "kernel/panic": (10, None),
    }


def test_read_sysctl_not_numeric_or_missing_returns_none(tmp_path: Path) -> None:
    (tmp_path / "sys").mkdir()
    (tmp_path / "sys/x").write_text("a b\n")
    assert read_sysctl("x", tmp_path) is None
    assert read_sysctl("y", tmp_path) is None


def test_read_kernel_empty_root_returns_only_release(tmp_path: Path) -> None:
    facts = read_kernel(tmp_path, tmp_path)
    assert facts == KernelFacts(os.uname().release)


def test_read_kernel_fixture_detects_config_and_modules(tmp_path: Path) -> None:
    release = os.uname().release
    (tmp_path / "boot").mkdir()
    (tmp_path / f"boot/config-{release}").write_text("CONFIG_BRIDGE=y\n")
    (tmp_path / f"lib/modules/{release}").mkdir(parents=True)
    (tmp_path / f"lib/modules/{release}/modules.dep").write_text("kernel/drivers/net/veth.ko.xz:\n")
    facts = read_kernel(tmp_path, tmp_path)
    assert facts.modules_known
    assert feature_state(BY_NAME["veth"], facts)
    assert feature_state(BY_NAME["bridge"], facts)
    with gzip.open(tmp_path / "config.gz", "wt") as file:
        file.write("CONFIG_OVERLAY_FS=m\n")
    assert feature_state(BY_NAME["overlayfs"], read_kernel(tmp_path, tmp_path))


def test_read_kernel_on_host_has_namespaces_and_filesystems() -> None:
    facts = read_kernel()
    assert facts.namespaces >= NAMESPACES
    assert {"proc", "tmpfs"} <= facts.present
    assert feature_state(Feature("x", "no_such_module", "CONFIG_NO_SUCH", ""), facts) is not True
