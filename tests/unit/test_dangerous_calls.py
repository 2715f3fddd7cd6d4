"""Nothing that comes from outside is run: what could do that in our sources is listed here, each with its reason."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

SOURCE = Path(__file__).resolve().parents[2] / "src"
BUILT_IN = {"eval", "exec", "compile", "__import__"}
CALLS = {
    "ast.literal_eval",
    "joblib.load",
    "marshal.load",
    "marshal.loads",
    "os.popen",
    "os.system",
    "pickle.Unpickler",
    "pickle.load",
    "pickle.loads",
    "shelve.open",
    "yaml.load",
    "yaml.unsafe_load",
}
KNOWN = {
    # What the core sends to a front, which it has started, over a pair of sockets that have no name.
    "nerite/fronts/process.py": ["pickle.loads", "pickle.loads"],
    # The conditions of our own packages, as they are installed.
    "nerite/tools/doctor_machine.py": ["eval"],
    # Between a worker and the process that it has started, over a pair of sockets that have no name.
    "nerite/llm/openvino_genai/messages.py": ["pickle.loads"],
    # Whether it compiles; what comes of it is not run.
    "nerite/backends/python/backend.py": ["compile"],
    # A module of the model, which is a program in any case.
    "nerite/backends/python/module.py": ["__import__"],
    # Literals in the calls that a model writes: no names, no operators; what is nested too deeply is text.
    "nerite/llm/openai/tool_blocks.py": ["ast.literal_eval"],
    # nerite add --trust, in a process of its own.
    "nerite/artifacts/convert_scikit_learn.py": ["pickle.loads", "joblib.load"],
}


def name_of(call: ast.Call) -> str:
    """Return what is called, as far as the text says."""
    return ast.unparse(call.func)


def dangerous(tree: ast.AST) -> Iterator[str]:
    """Yield what runs a program that it is given, or takes one for data."""
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call):
            continue
        name = name_of(node)
        given = {word.arg: ast.unparse(word.value) for word in node.keywords}
        if name in BUILT_IN or name in CALLS:
            yield name
        if given.get("shell", "False") != "False":
            yield f"{name}(shell=…)"
        if name == "torch.load" and given.get("weights_only") != "True":
            yield "torch.load"
        if name.endswith("np.load") and given.get("allow_pickle", "False") != "False":
            yield "np.load"


def test_the_list_finds_what_it_is_for() -> None:
    text = (
        "eval(x); pickle.loads(x); os.system(x); run(x, shell=True); torch.load(x); np.load(x, allow_pickle=y)\n"
        "json.loads(x); model.eval(); re.compile(x); run([x]); torch.load(x, weights_only=True); np.load(x)"
    )
    found = ["eval", "pickle.loads", "os.system", "run(shell=…)", "torch.load", "np.load"]
    assert list(dangerous(ast.parse(text))) == found


def test_nothing_from_outside_is_evaluated_or_unpickled() -> None:
    found = {}
    for path in sorted(SOURCE.rglob("*.py")):
        if calls := list(dangerous(ast.parse(path.read_text()))):
            found[str(path.relative_to(SOURCE))] = calls
    assert found == KNOWN
