"""NeMo's archives: training's own format, which wants to be exported."""

from __future__ import annotations

import tarfile

from nerite.artifacts.artifact import Artifact, Unusable
from nerite.artifacts.candidate import Candidate, cut_off

_PACKED = b"\x1f\x8b"
_EXPORT = (
    "Export it with NeMo: model = ModelPT.restore_from('{name}'); model.export('model.onnx'). "
    "A language model becomes a Hugging Face directory, or an engine of TensorRT-LLM."
)


def recognise(candidate: Candidate) -> Artifact | None:
    """Refuse an archive of NeMo, with how to export it."""
    if candidate.is_directory or not (candidate.suffix == ".nemo" or _is_tar(candidate)):
        return None
    try:
        with tarfile.open(candidate.path) as archive:
            members = archive.getmembers()
    except (tarfile.TarError, EOFError, OSError) as error:
        if candidate.suffix == ".nemo":
            raise cut_off(candidate.path, str(error)) from None
        return None
    names = [member.name.removeprefix("./") for member in members]
    end = max((member.offset_data + member.size for member in members), default=0)
    if end > candidate.size and not candidate.head.startswith(_PACKED):
        raise cut_off(candidate.path, f"{end - candidate.size:,} bytes are missing")
    if candidate.suffix != ".nemo" and "model_config.yaml" not in names:
        remedy = "Unpack it, and name the file or directory in it that is the model."
        raise Unusable(candidate.path, "this is an archive", remedy)
    raise Unusable(
        candidate.path,
        "this is a NeMo archive, which holds weights and settings",
        _EXPORT.format(name=candidate.path.name),
    )


def _is_tar(candidate: Candidate) -> bool:
    return candidate.head[257:262] == b"ustar" or (
        candidate.head.startswith(_PACKED) and candidate.path.name.endswith((".tar.gz", ".tgz"))
    )
