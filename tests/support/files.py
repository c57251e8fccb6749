"""Looking at directories in which others are at work."""

import os
from pathlib import Path


def below(top: Path) -> list[Path]:
    """Everything below a directory; what goes away while one looks is no error, as it is for `Path.rglob`."""
    return [Path(folder, name) for folder, folders, files in os.walk(top) for name in (*folders, *files)]
