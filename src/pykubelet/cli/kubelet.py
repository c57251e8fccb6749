"""Entry point of `kubelet`, with upstream's flags, configuration file and exit codes."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Sequence

from pykubelet.cli.errors import print_error
from pykubelet.config.errors import ConfigError
from pykubelet.config.last_good import load_or_last_good


def main(argv: Sequence[str] | None = None) -> None:
    """Run the `kubelet` command line and exit."""
    sys.exit(run(sys.argv[1:] if argv is None else argv))


def run(argv: Sequence[str]) -> int:
    """Run the kubelet, or print its help or version; return the exit code."""
    # Imported here, like the kubelet below: --help and --version must not load the kubelet's modules.
    from pykubelet.config.help import help_text, version_line

    try:
        loaded = load_or_last_good(argv)
    except ConfigError as err:
        return print_error("kubelet", err)
    if loaded.action == "help":
        print(help_text(min(120, shutil.get_terminal_size((100, 24)).columns)), end="")
        return 0
    if loaded.action == "version":
        print(version_line(loaded.flags.version))
        return 0

    from pykubelet.agent.kubelet import Kubelet
    from pykubelet.agent.live_config import ReloadTrigger
    from pykubelet.cli.process import host_problems, launch

    trigger = ReloadTrigger()

    async def run_kubelet() -> None:
        await Kubelet(loaded, reload_trigger=trigger, host_problems=host_problems).run()

    return launch("kubelet", loaded, run_kubelet, on_hangup=trigger.request)
