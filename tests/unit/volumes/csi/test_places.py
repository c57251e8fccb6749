"""What is on disk is found, whatever happens to it meanwhile."""

import itertools
import shutil
import threading
import time
from pathlib import Path

from pykubelet.volumes.csi.paths import CsiPaths, VolumeData, write_data


def test_csi_paths_all_data_pods_removed_concurrently_finds_remaining(tmp_path: Path) -> None:
    """The node's status tells of them, while others delete pods' folders in threads."""
    places, ended = CsiPaths(tmp_path), threading.Event()
    write_data(places.data("stays", "v"), VolumeData("h", "d"))

    def come_and_go() -> None:
        for number in itertools.cycle(range(20)):
            write_data(places.data(f"u{number}", "v"), VolumeData("h", "d"))
            shutil.rmtree(tmp_path / f"pods/u{number}")
            if ended.is_set():
                return

    churn = threading.Thread(target=come_and_go)
    churn.start()
    try:
        end = time.monotonic() + 1
        while time.monotonic() < end:
            found = list(places.all_data())
            assert places.data("stays", "v") in found
    finally:
        ended.set()
        churn.join()
    assert list(places.all_data()) == [places.data("stays", "v")]
