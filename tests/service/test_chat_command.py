"""``nerite chat`` as people and scripts use it: at a terminal, and in a pipe."""

from __future__ import annotations

import os
import pty
import re
import select
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from serving import NERITE, Serving, eventually, python_model, serving

CONFIG = """
backend: "python"
input [
  { name: "text_input" data_type: TYPE_STRING dims: [ 1 ] },
  { name: "return_num_input_tokens" data_type: TYPE_BOOL dims: [ 1 ] optional: true },
  { name: "return_num_output_tokens" data_type: TYPE_BOOL dims: [ 1 ] optional: true }
]
output [
  { name: "text_output" data_type: TYPE_STRING dims: [ 1 ] },
  { name: "finish_reason" data_type: TYPE_STRING dims: [ 1 ] },
  { name: "num_input_tokens" data_type: TYPE_UINT32 dims: [ 1 ] },
  { name: "num_output_tokens" data_type: TYPE_UINT32 dims: [ 1 ] }
]
instance_group [ { kind: KIND_CPU } ]
model_transaction_policy { decoupled: true }
"""
ECHO = """
def execute(self, requests):
    \"\"\"Say the prompt again, word by word; go on for ever if that is what it says.\"\"\"
    import json

    for request in requests:
        prompt = pb_utils.get_input_tensor_by_name(request, "text_input").as_numpy()[0].decode()
        limit = json.loads(request.parameters()).get("max_tokens", 1000)
        sender = request.get_response_sender()
        def send(word, reason):
            texts = {"text_output": f"{word} ", "finish_reason": reason}
            tensors = [pb_utils.Tensor(name, np.array([text.encode()], object)) for name, text in texts.items()]
            counts = {"num_input_tokens": len(prompt.split()), "num_output_tokens": 1}
            tensors += [pb_utils.Tensor(name, np.array([count], np.uint32)) for name, count in counts.items()]
            sender.send(pb_utils.InferenceResponse(tensors))
        words = prompt.split()
        if "fail" in words:
            sender.send(pb_utils.InferenceResponse(error=pb_utils.TritonError("it gave up")))
        elif "forever" in words[-3:]:
            while not request.is_cancelled():
                send("and", "None")
                time.sleep(0.01)
            print("it was stopped", flush=True)
        else:
            for word in words[:limit]:
                send(word, "length" if limit < len(words) and word is words[limit - 1] else "None")
        sender.send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
"""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serving]:
    folder = tmp_path_factory.mktemp("chat_command")
    python_model(folder / "models", "echo", ECHO, CONFIG)
    with serving(folder / "models", folder / "log") as running:
        yield running


def piped(url: str, *words: str, message: str = "How are you?") -> subprocess.CompletedProcess[str]:
    command = [str(NERITE), "chat", "--url", url, *words]
    return subprocess.run(command, input=message, capture_output=True, text=True, timeout=50)


class Terminal:
    """A chat with somebody who reads and types."""

    def __init__(self, server: Serving, *words: str) -> None:
        ours, its = pty.openpty()
        command = [str(NERITE), "chat", "--url", server.http, *words]
        # A dumb terminal is sent nothing but text.
        environment = {**os.environ, "TERM": "dumb"}
        self.process = subprocess.Popen(
            command, stdin=its, stdout=its, stderr=its, env=environment, start_new_session=True
        )
        os.close(its)
        self._ours = ours
        self._shown = ""

    def until(self, text: str) -> str:
        """Read until ``text`` is shown; return what was."""
        deadline = time.monotonic() + 30
        while text not in self._shown:
            ready, _, _ = select.select([self._ours], [], [], max(0.0, deadline - time.monotonic()))
            assert ready, f"instead of {text!r}: {self._shown!r}"
            self._shown += os.read(self._ours, 65536).decode().replace("\r\n", "\n")
        before, _, self._shown = self._shown.partition(text)
        return before

    def type(self, line: str) -> str:
        """Enter a line; return all that is shown until the next one may be entered."""
        self.enter(line)
        return self.until("\n> ")

    def enter(self, line: str) -> None:
        self.write(f"{line}\n".encode())
        self.until(f"{line}\n")

    def write(self, keys: bytes) -> None:
        os.write(self._ours, keys)

    def interrupt(self) -> None:
        self.process.send_signal(signal.SIGINT)

    def end(self) -> int:
        """Press Ctrl-D; return the exit status."""
        self.write(b"\x04")
        return self.close()

    def close(self) -> int:
        status = self.process.wait(20)
        os.close(self._ours)
        return status


@pytest.fixture
def terminal(server: Serving) -> Iterator[Terminal]:
    chat = Terminal(server)
    assert chat.until("\n> ").startswith("echo at 127.0.0.1:")
    yield chat
    if chat.process.poll() is None:
        chat.process.kill()
        chat.process.wait()


def test_a_pipe(server: Serving) -> None:
    done = piped(server.http)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == "user: How are you? assistant: \n"
    done = piped(server.http, "echo", "--system", "Be brief.", "--temperature=0", "--top-p=0.5", "--seed=1")
    assert done.stdout == "system: Be brief. user: How are you? assistant: \n"


def test_a_pipe_says_elsewhere_what_is_not_the_answer(server: Serving) -> None:
    done = piped(server.http, "--max-tokens=2", "--stats")
    assert (done.returncode, done.stdout) == (0, "user: How \n")
    cut, figures = done.stderr.splitlines()
    assert cut == "nerite chat: the answer was truncated at the token limit."
    expected = r"nerite chat: 2 tokens in .* s, the first after .* s, then .* per second, 5 prompt tokens"
    assert re.fullmatch(expected, figures)


def test_a_reader_who_has_seen_enough_stops_the_model(server: Serving) -> None:
    stopped = server.text.count("it was stopped")
    command = f"echo forever | {NERITE} chat --url {server.http} | head -c 12"
    done = subprocess.run(command, shell=True, capture_output=True, text=True, timeout=50)
    assert (done.stdout, done.stderr) == ("and and and ", "")
    eventually(lambda: server.text.count("it was stopped") > stopped)


def test_ctrl_c_in_a_pipe(server: Serving) -> None:
    stopped = server.text.count("it was stopped")
    command = [str(NERITE), "chat", "--url", server.http]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as chat:
        assert chat.stdin and chat.stdout and chat.stderr
        chat.stdin.write(b"forever")
        chat.stdin.close()
        assert chat.stdout.read(4) == b"and "
        chat.send_signal(signal.SIGINT)
        assert chat.wait(20) == 130
        assert chat.stderr.read() == b""
    eventually(lambda: server.text.count("it was stopped") > stopped)


@pytest.mark.parametrize(
    ("words", "message", "status", "says"),
    [
        (["ecko"], "x", 1, "nerite chat: Unknown model: ecko. Did you mean 'echo'?\n"),
        ([], "fail", 1, "nerite chat: it gave up\n"),
        ([], " \n", 2, "nerite chat: no message on standard input.\n    For example: echo 'How are you?' | nerite"),
        (["--temperature=9"], "x", 1, "nerite chat: Invalid value for 'temperature': 9.0"),
        (['--parameter=logit_bias={"1": 5}'], "x", 1, "logit_bias"),
        (["--temperature=warm"], "x", 2, "invalid float value: 'warm'"),
    ],
)
def test_refusals(server: Serving, words: list[str], message: str, status: int, says: str) -> None:
    done = piped(server.http, *words, message=message)
    assert (done.returncode, done.stdout) == (status, "")
    assert says in done.stderr


def test_nobody_is_there() -> None:
    done = piped("127.0.0.1:1", "echo")
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith("nerite chat: cannot reach http://127.0.0.1:1: Connection refused\n    Is a server")


def test_a_model_has_to_be_chosen_where_there_are_several(tmp_path: Path) -> None:
    models = tmp_path / "models"
    models.mkdir()
    with serving(models, tmp_path / "log", "--model-control-mode=explicit") as server:
        done = piped(server.http)
        assert done.returncode == 1
        assert "the server has no text model that is ready" in done.stderr
        for name in ("one", "two"):
            python_model(models, name, ECHO, CONFIG)
            assert server.ask("POST", f"/v2/repository/models/{name}/load")[0] == 200
        done = piped(server.http)
        assert done.returncode == 2
        expected = "the server has several text models: one, two\n    Specify one of them: nerite chat one\n"
        assert expected in done.stderr


def test_a_terminal(terminal: Terminal) -> None:
    assert terminal.type("Hello.") == "user: Hello. assistant: "
    # What was said goes with the next message.
    assert terminal.type("And now?") == ("user: Hello. assistant: user: Hello. assistant: user: And now? assistant: ")
    assert terminal.type("/reset") == "[conversation cleared]"
    assert terminal.type("/system Be brief.") == "[system message set]"
    assert terminal.type("Again") == "system: Be brief. user: Again assistant: "
    assert terminal.type("/system") == "[system message removed]"
    assert terminal.type("/reset") == "[conversation cleared]"
    assert "/system" in terminal.type("/help")
    assert terminal.type("/rest") == "[unknown command '/rest'. Did you mean '/reset'?]"
    assert terminal.type("/xyzzyx") == "[unknown command '/xyzzyx'. /help lists the commands.]"
    assert terminal.type(" /etc") == "user: /etc assistant: "
    assert terminal.end() == 0


def test_ctrl_c_stops_the_answer_and_not_the_program(server: Serving, terminal: Terminal) -> None:
    stopped = server.text.count("it was stopped")
    terminal.enter("forever")
    terminal.until("and and ")
    terminal.interrupt()
    assert "[stopped]" in terminal.until("\n> ")
    eventually(lambda: server.text.count("it was stopped") > stopped)
    terminal.interrupt()
    assert "[Press Ctrl-D or type /quit to leave the chat]" in terminal.until("> ")
    # The part that came is part of the chat.
    assert terminal.type("Well?").startswith("user: forever assistant: and and ")
    terminal.enter("/quit")
    assert terminal.close() == 0


def test_a_failure_is_not_part_of_the_chat(terminal: Terminal) -> None:
    assert terminal.type("fail") == "nerite chat: it gave up"
    assert terminal.type("Hello.") == "user: Hello. assistant: "
    assert terminal.end() == 0


def test_figures_and_the_end_of_a_cut_answer_at_a_terminal(server: Serving) -> None:
    chat = Terminal(server, "--stats", "--max-tokens=2")
    chat.until("\n> ")
    answer, cut, figures = chat.type("Hello there.").splitlines()
    assert (answer, cut) == ("user: Hello ", "[truncated at the token limit]")
    assert re.fullmatch(r"\[2 tokens in .* per second, 4 prompt tokens\]", figures)
    assert chat.end() == 0


def test_a_model_does_not_steer_the_terminal(terminal: Terminal) -> None:
    terminal.write(b"red \x16\x1b[31m rest\n")
    shown = terminal.until("\n> ")
    assert "\x1b" not in shown.partition("user:")[2]
    assert "\N{REPLACEMENT CHARACTER}[31m rest" in shown
    assert terminal.end() == 0
