"""Settings of every node of `pykubelet up`, whatever its flags: `up` writes them, `doctor` expects them."""

from __future__ import annotations

from typing import Any

UP_DEFAULTS: dict[str, Any] = {
    # Hosts such as laptops have swap; pods still get none of it.
    "failSwapOn": False,
    # The iptables rules belong to the host, where no component uses the kubelet's chains.
    "makeIPTablesUtilChains": False,
}
