"""Commands that ask a model, and work: by curl, in Python, by ``nerite client``."""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from urllib.parse import quote

from nerite.core import dtype as dtypes
from nerite.core.signature import Input, Signature
from nerite.transports.http.docs.sample import sample_of


class Snippets:
    """What to paste for one model; ``version`` is empty where the server is to choose."""

    def __init__(self, signature: Signature, url: str, version: str, *, decoupled: bool) -> None:
        self._signature = signature
        self._url = url
        self._version = version
        self._decoupled = decoupled

    def titled(self) -> Iterator[tuple[str, str]]:
        """Yield each, with what it is for."""
        curl = self._curl()
        if curl:
            yield "curl", curl
        yield "Python", self._python()
        yield "Command line", self._command()

    def _curl(self) -> str:
        sample = sample_of(self._signature, decoupled=self._decoupled)
        version = f"/versions/{self._version}" if self._version else ""
        path = f"/v2/models/{quote(self._signature.model_name)}{version}"
        url = self._url if "://" in self._url else f"http://{self._url}"
        return sample.curl(f"{url}{path}/{'generate_stream' if self._decoupled else 'infer'}") if sample else ""

    def _python(self) -> str:
        wanted = [declared for declared in self._signature.inputs.values() if not declared.optional]
        batch = (1,) if self._signature.max_batch_size else ()
        inputs = ",\n".join(f'        "{each.name}": {_value(each, batch)}' for each in wanted)
        version = f', version="{self._version}"' if self._version else ""
        call = f'("{self._signature.model_name}", inputs{version})'
        ask = f"    for response in client.stream{call}:\n        print(response)"
        if not self._decoupled:
            ask = f"    print(client.infer{call})"
        return (
            "import numpy as np\n"
            "from nerite.client import Client\n\n"
            f'with Client("{self._url}") as client:\n'
            f"    inputs = {{\n{inputs},\n    }}\n"
            f"{ask}"
        )

    def _command(self) -> str:
        server = [] if self._url == "localhost:8000" else ["--url", self._url]
        version = ["--version", self._version] if self._version else []
        stream = ["--stream"] if self._decoupled else []
        return shlex.join(
            ["nerite", "client", *server, "infer", self._signature.model_name, "--random", *version, *stream]
        )


def _value(declared: Input, batch: tuple[int, ...]) -> str:
    shape = (*batch, *(1 if size == -1 else size for size in declared.dims))
    if declared.datatype is dtypes.BYTES:
        return f'np.full({shape}, "text", object)'
    # BF16 is given as float32, for numpy has no such type.
    kind = "float32" if declared.datatype is dtypes.BF16 else declared.datatype.numpy.name
    return f"np.zeros({shape}, np.{kind if kind != 'bool' else 'bool_'})"
