"""How SageMaker and Vertex AI write inferences: the size of the JSON part stands in the content type."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Final

from nerite.core.errors import InvalidArgument, NeriteError
from nerite.transports.http.dialect import HTTP, Dialect
from nerite.transports.http.head import RequestHead

_SAGEMAKER: Final = "application/vnd.sagemaker-triton.binary+json;json-header-size="
_VERTEX: Final = "application/vnd.vertex-ai-triton.binary+json;json-header-size="
_NUMBER: Final = re.compile(r"\s*([+-]?[0-9]+)")
_NO_MEMORY: Final = re.compile(
    "(?i:out[ _]?of[ _]?memory)|MemoryError|OOM|CNMEM_STATUS_OUT_OF_MEMORY|CU(?:DNN|BLAS)_STATUS_NOT_INITIALIZED"
    "|CUBLAS_STATUS_ALLOC_FAILED|(?:Dst|Src) tensor is not initialized|[Ff]ailed to allocate memory"
    "|No space left on device"
)
"""What frameworks say when there is no memory left."""


def _json_size_in(binary: str) -> Callable[[RequestHead], int]:
    """Return what reads the size from a content type that begins with ``binary``. Any other type is JSON alone."""

    def json_size(head: RequestHead) -> int:
        content_type = head.headers.get("content-type", "")
        if binary not in content_type:
            return -1
        before, _, text = content_type.partition(binary)
        if before:
            raise InvalidArgument(f"expect MIME type for binary data starts with '{binary}', got: {content_type}")
        number = _NUMBER.match(text)
        try:
            size = int(number[1]) if number else None
        except ValueError:  # Python takes no number of so many digits
            size = None
        if size is None:
            raise InvalidArgument(f"Unable to parse inference header size, got: {text}")
        if size < 0 or (size > head.content_length and not head.chunked):
            raise InvalidArgument(f"inference header size should be in range (0, {head.content_length}), got: {text}")
        return size

    return json_size


def status_of(error: NeriteError) -> int:
    """Return the status that SageMaker wants: 507 makes it unload other models, and try again."""
    return 507 if _NO_MEMORY.search(error.message) else 400


SAGEMAKER: Final = HTTP._replace(
    json_size=_json_size_in(_SAGEMAKER),
    binary_headers=f"Content-Type: {_SAGEMAKER}%d\r\n".encode(),
    compresses=False,
)
SAGEMAKER_MODELS: Final = SAGEMAKER._replace(early_type="application/json", status_of=status_of)
"""Where there are several models."""
VERTEX: Final[Dialect] = HTTP._replace(json_size=_json_size_in(_VERTEX), compresses=False)
