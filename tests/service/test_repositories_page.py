"""The commands of docs/repositories.md, as they stand there."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

from pages import ROOT, Page, run
from serving import eventually, serving


def test_the_commands(tmp_path: Path) -> None:
    page = Page("docs/repositories.md")
    shutil.copytree(ROOT / "examples" / "sources" / "scaler", tmp_path / "models" / "scaler")
    with serving(
        tmp_path / "models", tmp_path / "log", "--model-control-mode=explicit", "--load-model=scaler"
    ) as server:

        def instances() -> int:
            count: int = server.json("GET", "/v2/models/scaler/config")["instance_group"][0]["count"]
            return count

        before = instances()
        with_configuration, without = page.block("nerite client load").strip().splitlines()
        run(with_configuration.replace("nerite client", f"nerite client --url {server.http}"))
        assert instances() == 3 != before
        run(without, server)
        assert instances() == before
        recording = page.block("--record").replace("nerite client", f"nerite client --url {server.http}")
        run(recording, cwd=tmp_path)
        assert json.loads((tmp_path / "requests.jsonl").read_text())["inputs"][0]["data"] == [1.0, 2.0, 3.0]
        index = page.block("curl -X POST")
        eventually(lambda: all(entry["content_hash"].startswith("sha256:") for entry in json.loads(run(index, server))))
