"""Objects of kinds that nobody has read before, read by several threads at once.

In a process of its own, because what went wrong with that was the end of the process.
"""

import subprocess
import sys

SCRIPT = """
import sys
import threading

import msgspec

from pykubelet.api.meta import from_document, from_json

sys.setswitchinterval(1e-6)
for _ in range(100):
    leaf = msgspec.defstruct("Leaf", [(f"f{n}", int | None, None) for n in range(40)])
    tree = msgspec.defstruct("Tree", [(f"f{n}", leaf | None, None) for n in range(40)])
    start = threading.Barrier(3)
    read = [
        lambda: from_document(tree, {"f39": {"f39": 1}}),
        lambda: from_json(leaf, b'{"f39": 1}'),
        lambda: from_json(tree, b'{"f39": {"f39": 1}}'),
    ]
    threads = [threading.Thread(target=lambda read=read: (start.wait(), read())) for read in read]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
print("all read")
"""


def test_from_document_concurrent_threads_first_decode_succeeds() -> None:
    done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "all read\n", "")
