"""`python -m tests.kubeadm.guest.worker`: the guest that joins, commanded by the control plane's."""

from tests.kubeadm.guest.node import prepare_node, save_logs, say, this_member, write_network
from tests.kubeadm.images import WORKER_FILES
from tests.kubeadm.remote import run_command, serve
from tests.kubeadm.settings import shared


def main() -> None:
    """Prepare this guest, and run commands until it is stopped."""
    prepare_node(list(WORKER_FILES))
    write_network(this_member())
    say("prepared")
    try:
        serve(shared("worker"), run_command)
    finally:
        save_logs()


if __name__ == "__main__":
    main()
