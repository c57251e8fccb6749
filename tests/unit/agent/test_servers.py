"""What the servers publish of the node."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from pykubelet.agent.servers import _published_info
from pykubelet.config.feature_gates import FeatureGates
from pykubelet.config.flags.kubelet_flags import KubeletFlags
from pykubelet.config.types import KubeletConfiguration
from pykubelet.server.node_info import read_node_info


@pytest.mark.parametrize(
    ("clustered", "gate", "served"),
    [
        (True, True, set()),
        (True, False, {"configmaps", "secrets", "serviceaccounts"}),
        (False, True, {"configmaps", "secrets", "persistentvolumeclaims"}),
    ],
)
async def test_published_info_served_kinds_follow_mode_and_gate(
    tmp_path: Path, clustered: bool, gate: bool, served: set[str]
) -> None:
    parts: Any = SimpleNamespace(
        settings=SimpleNamespace(
            flags=KubeletFlags(root_dir=str(tmp_path)),
            config=KubeletConfiguration(),
            gates=FeatureGates().with_overrides({"PreventStaticPodAPIReferences": gate}),
            node_name="n1",
        ),
        cluster=object() if clustered else None,
    )
    info = await _published_info(parts)
    assert info == read_node_info(tmp_path)
    assert info.served is not None
    assert served <= set(info.served)
    assert bool(info.served) == bool(served)
    assert "resourceclaims" not in info.served
