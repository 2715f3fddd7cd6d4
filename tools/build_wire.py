"""Compiles src/nerite/wire/*.proto into the descriptors used at run time and the types mypy reads."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path

from google.protobuf.descriptor_pb2 import FileDescriptorSet

SOURCE = Path(__file__).parents[1] / "src"
WIRE = SOURCE / "nerite" / "wire"
HEADER = """\
# Made by tools/build_wire.py from {name}.proto. Do not edit.
# ruff: noqa
# fmt: off
# mypy: disable-error-code="type-arg, no-untyped-def"
"""


def compiled() -> dict[Path, bytes]:
    """Return each file to be written, with its content. Raises ``CalledProcessError`` if a .proto is wrong."""
    protos = sorted(WIRE.glob("*.proto"))
    with tempfile.TemporaryDirectory() as scratch:
        out = Path(scratch)
        options = [f"-I{SOURCE}", f"--pyi_out={out}", f"--descriptor_set_out={out / 'set'}"]
        names = [str(path.relative_to(SOURCE)) for path in protos]
        subprocess.run([sys.executable, "-m", "grpc_tools.protoc", *options, *names], check=True)
        descriptors = FileDescriptorSet.FromString((out / "set").read_bytes())
        files = {WIRE / "descriptors.pb": descriptors.SerializeToString(deterministic=True)}
        for path in protos:
            stub = (out / "nerite" / "wire" / f"{path.stem}_pb2.pyi").read_text()
            # protoc names its modules x_pb2; ours are named after the file.
            for other in protos:
                stub = stub.replace(f"{other.stem}_pb2", other.stem)
            files[path.with_suffix(".pyi")] = (HEADER.format(name=path.stem) + stub).encode()
    return files


def main() -> None:
    """Write what is out of date, and name it."""
    for path, content in compiled().items():
        if not path.exists() or path.read_bytes() != content:
            path.write_bytes(content)
            print(f"wrote {path.relative_to(SOURCE.parent)}")


if __name__ == "__main__":
    main()
