"""What can go wrong with a control plane of our own: always one line with the cause and a remedy."""


class DevClusterError(Exception):
    """The control plane cannot do what was asked."""


class NotAvailable(DevClusterError):
    """Its programs are not here and cannot be built here."""
