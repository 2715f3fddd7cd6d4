"""Converts a GGUF file to OpenVINO's files: ``python gguf_conversion.py FILE.gguf DIRECTORY``, in a process of its own.

OpenVINO GenAI reads the file and saves what it made of it beside the file, so the file is linked into the directory.
"""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType
from typing import cast

_FILES = ("openvino_model.xml", "openvino_model.bin", "openvino_tokenizer.xml", "openvino_detokenizer.xml")


def main(file: str, directory: str) -> int:
    """Convert a file; print the reason and return 1 if that is not possible."""
    # Its import fails, which OpenVINO handles: otherwise it sends telemetry.
    sys.modules["openvino_telemetry"] = cast(ModuleType, None)
    import openvino  # noqa: F401  # the other library requires that it is imported first
    import openvino_genai

    link = Path(directory, "model.gguf")
    link.symlink_to(file)
    try:
        openvino_genai.LLMPipeline(str(link), "CPU", enable_save_ov_model=True)
    except Exception as error:  # of the library: an unknown architecture, a damaged file
        print(error)
        return 1
    finally:
        link.unlink()
    missing = [name for name in _FILES if not Path(directory, name).is_file()]
    if missing:
        print(f"OpenVINO GenAI has not written {', '.join(missing)}")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
