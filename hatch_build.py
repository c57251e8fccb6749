"""Compiles the project's .proto files into the package when it is built or installed.

The generated modules are build products: they are never committed, so they cannot
drift from the .proto beside them. A module that has not changed is left as it is, and
another one is replaced atomically: programs of this checkout may run during a build.
"""

import tempfile
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface


class ProtoBuildHook(BuildHookInterface):  # type: ignore[misc]  # hatchling is there at build time only
    """Runs protoc over every .proto below src/ before files are collected."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Write `x_pb2.py` and `x_pb2.pyi` beside each `x.proto`."""
        from grpc_tools import protoc

        src = Path(self.root) / "src"
        protos = sorted(str(p) for p in src.rglob("*.proto"))
        if not protos:
            return
        with tempfile.TemporaryDirectory(prefix=".proto-", dir=self.root) as directory:
            out = Path(directory)
            code = protoc.main(["protoc", f"-I{src}", f"--python_out={out}", f"--pyi_out={out}", *protos])
            if code != 0:
                raise RuntimeError(f"protoc failed with exit code {code} on {protos}")
            for made in sorted(path for path in out.rglob("*") if path.is_file()):
                target = src / made.relative_to(out)
                if not target.exists() or target.read_bytes() != made.read_bytes():
                    made.replace(target)
