"""Fixtures of all tests: a real private runtime, started once and verified to leave nothing behind."""

import asyncio
import gc
import logging
import os
import random
import secrets
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings

from pykubelet.devcluster.binaries import ASSETS, module_cache_dir, source_module
from pykubelet.devcluster.layout import NotAvailable
from pykubelet.linux.iptables import shared_chains_present
from pykubelet.linux.kernel import KERNEL_DEFAULTS
from pykubelet.logs.logger import ROOT
from pykubelet.standalone import instance_registry as registry
from pykubelet.standalone.data_dir import SHARED_DIRECTORIES, load_state
from pykubelet.standalone.instance import EmbeddedError, Instance
from pykubelet.standalone.teardown import down
from tests import durations
from tests.support import newer_runtime
from tests.support.pressure_table import table_lines
from tests.support.runtime import RunningRuntime, runtime_process, why_no_machine

# How long an example takes says something of the machine's load, nothing of the code. The examples come
# from the run's seed, also where hypothesis finds itself in a CI.
settings.register_profile("seeded", deadline=None, derandomize=False)
settings.load_profile("seeded")
settings.register_profile("quick", settings.get_profile("seeded"), max_examples=25)

MACHINE_TIMEOUT_SECONDS = 600
"""Timeout of a test with the `machine` marker or in an emulated machine; pyproject.toml has the others'."""

CLUSTER_TIMEOUT_SECONDS = 1800
"""Timeout of a test in tests/cluster: the first one may have to build the control plane."""

_BUILD = "from pykubelet.devcluster.binaries import find_programs; find_programs(print)"
_building = pytest.StashKey[subprocess.Popen[bytes]]()


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the options of this suite."""
    parser.addoption(
        "--seed",
        type=int,
        metavar="N",
        help="seed of all randomness in the tests (default: $PYKUBELET_SEED, or a new one for each run)",
    )
    parser.addoption(
        "--store-durations", action="store_true", help=f"write how long each file took to {durations.FILE}"
    )


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config: pytest.Config) -> None:
    """Choose the run's seed, and let Ctrl-C end child processes also when the tests run in the background.

    The workers of pytest-xdist also inherit a hash seed from it, which orders sets of strings; a run in one
    process needs PYTHONHASHSEED in its environment for that.
    """
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if config.option.seed is None:
        config.option.seed = int(os.environ.get("PYKUBELET_SEED") or secrets.randbelow(2**32))
    # One answer for all workers, which must agree on the order: the build may end while they collect.
    config.option.plane_is_built = _plane_is_built()
    for name, value in getattr(config, "workerinput", {}).get("decided", {}).items():
        setattr(config.option, name, value)
    _choose_runtime(config)
    os.environ.setdefault("PYTHONHASHSEED", str(config.option.seed % 2**32))
    if config.option.hypothesis_seed is None:
        config.option.hypothesis_seed = str(config.option.seed)
    if config.option.store_durations and not _is_worker(config):
        config.pluginmanager.register(durations.Recorder(), "durations")


def _choose_runtime(config: pytest.Config) -> None:
    """Put containerd 2.x first in PATH for RUNTIME=2; the first run on a machine builds it."""
    if config.option.collectonly:
        return
    try:
        newer_runtime.put_first(lambda text: print(text, file=sys.stderr, flush=True))
    except (NotAvailable, ValueError) as err:
        raise pytest.UsageError(str(err)) from err


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node: Any) -> None:
    """Hand the decisions of pytest-xdist's controlling process to a worker."""
    option = node.config.option
    node.workerinput["decided"] = {"seed": option.seed, "plane_is_built": option.plane_is_built}


def pytest_report_header(config: pytest.Config) -> str:
    """Print the seed before the first test."""
    return f"seed: {config.option.seed} (PYKUBELET_SEED={config.option.seed} reproduces the run)"


@pytest.hookimpl(trylast=True)
def pytest_sessionstart(session: pytest.Session) -> None:
    """Print the seed also with -q, which suppresses the header: a run that hangs prints nothing later."""
    config = session.config
    if config.get_verbosity() < 0 and config.pluginmanager.has_plugin("terminalreporter"):
        config.get_terminal_writer().line(pytest_report_header(config))


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Seed the test's randomness from the run's seed and the test's id, whatever ran before it."""
    random.seed(f"{item.config.option.seed} {item.nodeid}")


PRESSURE_VARIABLE = "PYKUBELET_PRESSURE"
"""Environment variable with which tests that are marked `pressure` run (`make pressure`)."""
PRESSURE_TABLE_VARIABLE = "PRESSURE_TABLE"
"""Environment variable with the file for the results of these tests as a table, which is printed as well."""


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Print the table of `make pressure`, and write it to a file."""
    reports = [report for found in terminalreporter.stats.values() for report in found]
    lines = table_lines(report for report in reports if isinstance(report, pytest.TestReport))
    if not lines:
        return
    terminalreporter.section("node pressure")
    for line in lines:
        terminalreporter.line(line)
    if path := os.environ.get(PRESSURE_TABLE_VARIABLE):
        Path(path).write_text("\n".join(lines) + "\n")


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Set timeouts, order the files for the workers, and build the control plane where that is needed.

    The build takes minutes of both processors the first time. It runs at the lowest priority while other
    tests run; those that need it come last then, and at the place that their duration demands otherwise.
    """

    def needs_plane(item: pytest.Item) -> bool:
        return Path(__file__).parent / "cluster" in item.path.parents

    def is_slow(item: pytest.Item) -> bool:
        in_guest = Path(__file__).parent / "vm" in item.path.parents
        return in_guest or item.get_closest_marker("machine") is not None

    if os.environ.get(PRESSURE_VARIABLE) != "1":
        alone = [item for item in items if item.get_closest_marker("pressure") is not None]
        if alone:
            items[:] = [item for item in items if item.get_closest_marker("pressure") is None]
            config.hook.pytest_deselected(items=alone)
    for item in items:
        if item.get_closest_marker("timeout") is None and needs_plane(item):
            item.add_marker(pytest.mark.timeout(CLUSTER_TIMEOUT_SECONDS))
        elif item.get_closest_marker("timeout") is None and is_slow(item):
            item.add_marker(pytest.mark.timeout(MACHINE_TIMEOUT_SECONDS))
    is_built = config.option.plane_is_built
    durations.order(items, cluster_last=not is_built, longest_first=_is_worker(config))
    mixed = bool(items) and needs_plane(items[-1]) and not needs_plane(items[0])
    # Of several processes that share the tests, the first builds.
    first = os.environ.get("PYTEST_XDIST_WORKER", "gw0") == "gw0"
    if mixed and first and not is_built and not config.option.collectonly:
        config.stash[_building] = subprocess.Popen(
            ["nice", "-n", "19", sys.executable, "-c", _BUILD],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )


def pytest_collection_finish() -> None:
    """Exempt the items and modules from garbage collection, which would traverse them in each full round."""
    gc.collect()
    gc.freeze()


def _is_worker(config: pytest.Config) -> bool:
    return hasattr(config, "workerinput")


def _plane_is_built() -> bool:
    """Return whether the control plane's binaries are there, or cannot be built here."""
    try:
        return bool(os.environ.get(ASSETS)) or module_cache_dir(source_module()).is_dir()
    except NotAvailable:
        return True


def pytest_unconfigure(config: pytest.Config) -> None:
    """End a build that nobody waits for any more."""
    if (build := config.stash.get(_building, None)) is not None and build.poll() is None:
        os.killpg(build.pid, signal.SIGKILL)
        build.wait()


@pytest.fixture(autouse=True)
def log_level() -> Iterator[None]:
    """Give the next test the verbosity of this one's beginning: some change it, others count lines."""
    root = logging.getLogger(ROOT)
    before = root.level
    yield
    root.setLevel(before)


@pytest.fixture(scope="session", autouse=True)
def kernel_settings() -> Iterator[None]:
    """Take back what agents set of this machine's kernel."""
    paths = [Path("/proc/sys", name) for name in KERNEL_DEFAULTS]
    before = {path: path.read_text() for path in paths if path.exists()}
    yield
    for path, text in before.items():
        if path.read_text() != text:
            path.write_text(text)


@pytest.fixture
def data_dir() -> Iterator[Path]:
    """A short path for a data directory; whatever a test makes of it is gone afterwards."""
    yield from _data_dir()


@pytest.fixture(scope="session")
def private_runtime() -> Iterator[RunningRuntime]:
    """A real containerd for the whole run: `.endpoint`, `.instance`, `.pause_image`, `.busybox_image`.

    Containers that a test leaves behind are removed at the end. Create them with a
    `cgroup_parent` below `.instance.cgroup_root`, and with names of your own.
    """
    if reason := why_no_machine():
        pytest.skip(reason)
    for path in _data_dir():
        with runtime_process(path) as runtime:
            yield runtime


def _data_dir() -> Iterator[Path]:
    # Sockets have short paths, and pytest's own temporary directories have long ones.
    with tempfile.TemporaryDirectory(prefix="pyk-", dir="/tmp") as parent:
        # Pods with user namespaces reach their files as another user.
        Path(parent).chmod(0o711)
        path = Path(parent) / "d"
        try:
            yield path
        finally:
            if why_no_machine() == "" and path.exists() and (path / ".pykubelet").exists():
                asyncio.run(_prove_removal(Instance.at(path)))


async def _prove_removal(instance: Instance) -> None:
    said: list[str] = []
    try:
        kept = load_state(instance)
    except EmbeddedError:
        kept = None
    assert await down(instance, said.append) == [], f"down left something behind; it said {said}"
    assert not instance.data_dir.exists()
    if kept is not None:
        shared: set[str] = set()
        for _ in range(10):
            shared = {str(path) for path in SHARED_DIRECTORIES if path.exists()} - set(kept.found_paths)
            shared |= await shared_chains_present() - set(kept.found_chains)
            # Another one on this machine, perhaps of another run of these tests, still needs them.
            if not shared or registry.DIRECTORY.exists():
                return
            # Or it has left since we looked.
            await asyncio.sleep(0.5)
        raise AssertionError(f"nobody needs these any more: {shared}")
