import resource
import subprocess
import sys

import pytest

from pykubelet.linux.process_limits import FileDescriptorLimits, attainable_soft_limit, has_capability


def in_a_child(wanted: int, before: tuple[int, int]) -> FileDescriptorLimits:
    """Limits cannot be taken back, so a process of its own tries them."""
    script = (
        "import resource, sys\n"
        "from pykubelet.linux.process_limits import raise_open_files\n"
        f"resource.setrlimit(resource.RLIMIT_NOFILE, {before})\n"
        f"got = raise_open_files({wanted})\n"
        "assert (got.soft, got.hard) == resource.getrlimit(resource.RLIMIT_NOFILE)\n"
        "print(got.soft, got.hard, got.configured)\n"
    )
    out = subprocess.run([sys.executable, "-c", script], check=True, capture_output=True, text=True).stdout
    return FileDescriptorLimits(*map(int, out.split()))


def test_raise_open_files_sets_soft_and_hard_limit() -> None:
    assert in_a_child(2000, (1000, 3000)) == FileDescriptorLimits(2000, 2000, 2000)
    assert in_a_child(3000, (1000, 3000)).reached


@pytest.mark.skipif(has_capability("CAP_SYS_RESOURCE"), reason="only without CAP_SYS_RESOURCE")
def test_raise_open_files_without_capability_raises_soft_to_hard() -> None:
    got = in_a_child(1_000_000, (1000, 3000))
    assert got == FileDescriptorLimits(3000, 3000, 1_000_000)
    assert not got.reached


def test_raise_open_files_above_kernel_maximum_is_not_fatal() -> None:
    got = in_a_child(2**40, (1000, 3000))
    assert got.soft == 3000
    assert not got.reached


def test_attainable_soft_limit_is_bounded_by_hard_limit() -> None:
    assert attainable_soft_limit(5, resource.RLIM_INFINITY) == 5
    assert attainable_soft_limit(5, 4) == 4
    assert FileDescriptorLimits(resource.RLIM_INFINITY, resource.RLIM_INFINITY, 10).reached
