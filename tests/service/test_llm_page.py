"""docs/llm.md: what is said to a model is answered as the page says, and its configurations load."""

from __future__ import annotations

import json
import re
from pathlib import Path

from llm_models import language_model
from pages import Page, run
from serving import serving

PAGE = Page("docs/llm.md")
CONFIGURATIONS = [text for language, text in PAGE.blocks if language == "pbtxt"]


def test_the_page(tmp_path: Path) -> None:
    models = tmp_path / "models"
    # What the exporter writes, which is not installed here: it needs another release of transformers.
    assert PAGE.block("optimum-cli").endswith(" models/chat/1\n")
    assert PAGE.block("serve") == "nerite serve models\n"
    single, exact, guessing, narrow = CONFIGURATIONS
    configs = {"chat": "", "single": single, "exact": exact, "guessing": guessing, "narrow": narrow}
    for name, config in configs.items():
        language_model(models / name / "1")
        if config:
            (models / name / "config.pbtxt").write_text(config)
    # Those about adapters are run in test_adapters.py.
    curls = [text for _, text in PAGE.blocks if text.startswith("curl") and "lora" not in text]
    plain, streamed, sampled, of_tensorrt_llm, expressed, structured = curls
    with serving(models, tmp_path / "log") as server:
        whole = json.loads(run(plain, server))["text_output"]
        assert whole.startswith("The capital of France is")
        events = [json.loads(line[6:]) for line in run(streamed, server).splitlines() if line.startswith("data: ")]
        assert "The capital of France is" + "".join(event["text_output"] for event in events) == whole
        answer = json.loads(run(sampled, server))
        assert answer["finish_reason"] in ("stop", "length")
        assert not {".", "!"} & set(answer["text_output"])
        assert not {".", "!"} & set(json.loads(run(of_tensorrt_llm, server))["text_output"])
        assert re.fullmatch("(red|green), [0-9]{1,2}", json.loads(run(expressed, server))["text_output"])
        drawn = json.loads(json.loads(run(structured, server))["choices"][0]["text"])
        assert (drawn["colour"] in ("red", "green"), 0 <= drawn["number"] <= 99) == (True, True)
        inputs = [{"name": "text_input", "shape": [1], "datatype": "BYTES", "data": ["once"]}]
        for name in ("single", "exact", "guessing", "narrow"):
            assert server.json("POST", f"/v2/models/{name}/generate", {"text_input": "once"})["text_output"]
        assert server.json("POST", "/v2/models/single/infer", {"inputs": inputs})["outputs"][0]["data"]
