"""examples/llm: its programs train, in a small run, and its page is followed with what comes of that."""

from __future__ import annotations

import io
import json
import re
import runpy
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from pages import ROOT, Page, run
from serving import NERITE, Serving, serving

FOLDER = ROOT / "examples" / "llm"
PAGE = Page("examples/llm/README.md")
MADE = shutil.ignore_patterns("*.npy", "*.json", "docent", "__pycache__")
QUESTION = "What does shlex.quote do?"

pytestmark = pytest.mark.timeout(300)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The repository, with models that are as small as they may be and have hardly learnt anything."""
    models = tmp_path_factory.mktemp("llm_examples") / "models"
    shutil.copytree(FOLDER / "models", models, ignore=MADE)
    (models / "docent").mkdir()
    shutil.copy(FOLDER / "models" / "docent" / "config.pbtxt", models / "docent")
    for program, size in (
        ("train.py", "--passes 1 --steps 100 --width 64 --layers 2"),
        ("train_embedding.py", "--passes 6"),
    ):
        # Several threads would mostly wait for each other.
        run(f"OMP_NUM_THREADS=1 {sys.executable} {FOLDER / program} {size} --models {models}", seconds=250)
    return models


@pytest.fixture(scope="module")
def server(models: Path) -> Iterator[Serving]:
    run([str(NERITE), "check", str(models)])
    with serving(models, models.with_name("log")) as running:
        yield running


def client(name: str, *words: str, server: Serving) -> str:
    return run([sys.executable, str(FOLDER / name), "--url", server.http, *words], seconds=100)


def test_the_page() -> None:
    commands = PAGE.block("train_embedding.py").splitlines()
    assert commands[0] == "pip install 'nerite[llm,openai,pipelines]'"
    made = run(["make", "--dry-run", "--always-make", "train-llm"])
    for command in commands[1:]:
        assert command in made
    for command in PAGE.block("call_tools.py").splitlines():
        assert (ROOT / command.split()[1]).is_file()


def test_served_it_says_what_the_checkpoint_says(models: Path, server: Serving) -> None:
    import torch
    from transformers import AutoTokenizer, LlamaForCausalLM

    folder = models / "docent" / "1"
    tokenizer = AutoTokenizer.from_pretrained(folder)
    messages = [{"role": "user", "content": QUESTION}]
    asked = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    with torch.no_grad():
        written = LlamaForCausalLM.from_pretrained(folder).generate(**asked, max_new_tokens=12, do_sample=False)
    body = {"model": "docent", "messages": messages, "temperature": 0, "max_tokens": 12}
    answer = server.json("POST", "/v1/chat/completions", body)
    assert answer["usage"]["prompt_tokens"] == asked["input_ids"].shape[1]
    said = tokenizer.decode(written[0, asked["input_ids"].shape[1] :], skip_special_tokens=True)
    assert answer["choices"][0]["message"]["content"] == said


def test_chats(server: Serving) -> None:
    command = PAGE.block("nerite chat").strip()
    for model in ("docent", "librarian"):
        asked = f"echo '{QUESTION}' | {command.replace('docent', model)} --max-tokens 20 --url {server.http}"
        assert run(asked)


def test_the_librarian(server: Serving) -> None:
    for question in runpy.run_path(str(FOLDER / "ask_librarian.py"))["QUESTIONS"]:
        assert question in client("ask_librarian.py", server=server)
    passages = server.json("POST", "/v2/models/search/generate", {"text_input": QUESTION})["passages"]
    assert passages[0].startswith("shlex.quote: Return a shell-escaped version")
    document = {"text_input": QUESTION, "stream": True, "sampling_parameters": json.dumps({"max_tokens": 4})}
    events = server.ask("POST", "/v2/models/librarian/generate_stream", document)[2].decode().split("data: ")[1:]
    assert "".join(json.loads(event)["text_output"] for event in events)


def test_the_embedding(server: Serving) -> None:
    texts = ["How do I quote a string for the shell?", "shlex.quote: Return a shell-escaped version.", "math.pi"]
    answer = server.json("POST", "/v1/embeddings", {"model": "embed", "input": texts})
    question, right, wrong = (np.array(each["embedding"]) for each in answer["data"])
    assert np.linalg.norm(question) == pytest.approx(1)
    assert question @ right > question @ wrong


def test_tools(server: Serving) -> None:
    # Whether the model calls one is a matter of training; that the program goes on with it is not.
    assert client("call_tools.py", server=server).count("What is the weather in Oslo?\n    ") == 1
    calls = [("weather", '{"city": "Oslo"}'), ("weather", '{"town": "Oslo"}'), ("shell", "{}")]
    program = f"import call_tools\nfor call in {calls}: print(call_tools.called(*call))"
    right, wrong, unknown = run([sys.executable, "-c", program], cwd=FOLDER).splitlines()
    assert right == "snowy"
    assert "unexpected keyword argument 'town'" in wrong
    assert unknown == "there is no tool shell"


def test_json(server: Serving) -> None:
    """A model that has learnt next to nothing keeps to a schema, if it comes to its end."""
    for line in client("write_json.py", server=server).splitlines():
        assert re.search(r" ((red|green|blue|yellow) +(circle|square|triangle) |\(it did not come to an end\)$)", line)


def test_a_picture(server: Serving) -> None:
    # What is said of it is a matter of training.
    assert client("describe_picture.py", server=server)
    image = runpy.run_path(str(FOLDER / "describe_picture.py"))["drawn"]()
    see = runpy.run_path(str(FOLDER / "models" / "see" / "1" / "model.py"))
    pixels = np.asarray(Image.open(io.BytesIO(image)).resize((see["SIDE"], see["SIDE"])), dtype=np.int16)
    assert sorted(see["things"](pixels)) == [
        "blue square on the right",
        "green triangle at the bottom",
        "red circle at the top left",
    ]
    content = [
        {"type": "text", "text": "What is on the picture?"},
        {"type": "image_url", "image_url": {"url": "data:image/png;base64,bm8="}},
    ]
    status, _, body = server.ask(
        "POST", "/v1/chat/completions", {"model": "describe", "messages": [{"role": "user", "content": content}]}
    )
    assert (status, "the image cannot be read" in body.decode()) == (400, True)
