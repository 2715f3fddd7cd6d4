"""docs/images.md: what it asks is answered."""

from __future__ import annotations

import base64
import json
from pathlib import Path

from pages import Page, run
from painting_models import painting_model
from serving import serving
from tools import require

PAGE = Page("docs/images.md")


def test_the_page(tmp_path: Path) -> None:
    require("curl")
    assert PAGE.block("optimum-cli").split()[-1] == "models/paints/1"
    assert PAGE.block("serve") == "nerite serve models\n"
    painting_model(tmp_path / "models" / "paints" / "1")
    with serving(tmp_path / "models", tmp_path / "log") as server:
        run(PAGE.block("curl"), server, tmp_path)
        (image,) = json.loads((tmp_path / "answer.json").read_text())["data"]
        file = base64.b64decode(image["b64_json"])
        assert file.startswith(b"\x89PNG")
        assert (int.from_bytes(file[16:20], "big"), int.from_bytes(file[20:24], "big")) == (512, 512)
