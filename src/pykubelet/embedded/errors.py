"""What can go wrong with the private runtime: always one line with the cause and a remedy."""


class EmbeddedError(Exception):
    """The private runtime cannot do what was asked."""


class DirectoryError(EmbeddedError):
    """The data directory cannot be used, or is not ours."""


class AlreadyRunning(EmbeddedError):
    """Another process holds the data directory."""

    def __init__(self, message: str, pid: int | None) -> None:
        super().__init__(message)
        self.pid = pid
        """Who holds it; None when that could not be found out."""


class MissingPrograms(EmbeddedError):
    """Programs that the private runtime consists of are not installed."""


class RuntimeFailed(EmbeddedError):
    """containerd does not start, or does not answer."""
