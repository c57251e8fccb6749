import csv
import json
from pathlib import Path
from typing import Any

import pytest

from pykubelet.config.load import load
from pykubelet.logs.mask import MASK
from pykubelet.server.debug import configz_document

DATA = Path(__file__).parents[2] / "data"


def look_up(document: Any, path: str) -> Any:
    for part in path.split("."):
        assert part in document, f"{path} is not shown"
        document = document[part]
    return document


@pytest.mark.parametrize("sample", ["kubelet-hand-built-v1.25.yaml", "kubelet-kubeadm-v1.25.yaml"])
def test_configz_document_real_config_shows_every_field(sample: str) -> None:
    config = load(["--config", str(DATA / sample)]).config
    document = json.loads(json.dumps(configz_document(config)))["kubeletconfig"]
    assert document["kind"] == "KubeletConfiguration"
    assert document["apiVersion"] == "kubelet.config.k8s.io/v1beta1"
    with (DATA / "config-fields-v1.36.tsv").open() as table:
        fields = [row["field"] for row in csv.DictReader(table, delimiter="\t")]
    for field in fields:
        parent = field.rpartition(".")[0]
        if not parent or look_up(document, parent) is not None:
            look_up(document, field)


def test_configz_document_static_pod_url_headers_masked() -> None:
    config = load(["--manifest-url=http://127.0.0.1/pods", "--manifest-url-header=X-Token:s3cr3t"]).config
    text = json.dumps(configz_document(config))
    assert "s3cr3t" not in text
    assert json.loads(text)["kubeletconfig"]["staticPodURLHeader"] == {"X-Token": [MASK]}
    assert config.static_pod_url_header == {"X-Token": ["s3cr3t"]}
