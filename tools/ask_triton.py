"""Plays the conformance exchanges against Triton alone and prints what it answers, as Markdown.

tools/ask_triton.py [topic ...]
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Iterator
from itertools import groupby
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from conformance.ask import Answer, ask
from conformance.differences import NEVER, by_exchange
from conformance.exchange import Change, Eventually, Grpc, Http, Raw, Scrape, Session, Step, Stream, Together
from conformance.servers import start_triton
from conformance.topics import topics

WIDTH = 600
"""Longer texts are cut to this, once they are much longer."""


def shown(step: Step) -> Iterator[str]:
    """One line for each request of a step."""
    match step:
        case Http():
            headers = "".join(f" [{name}: {value}]" for name, value in step.headers)
            yield f"{step.method} {step.path}{headers} {readable(step.body)}".rstrip()
        case Session():
            for request in step.requests:
                yield from shown(request)
        case Raw():
            yield from [readable(step.data)] * step.answers
        case Grpc():
            message = step.message if isinstance(step.message, bytes) else str(step.message)
            metadata = "".join(f" [{name}: {value}]" for name, value in step.metadata)
            yield f"{step.call}{metadata} {cut(' '.join(str(message).split()))}"
        case Stream():
            for message in step.messages:
                yield f"ModelStreamInfer {cut(' '.join(str(message).split()))}"
        case Scrape():
            yield f"metrics {step.prefix}*"
        case Together():
            for each in step.steps:
                yield from shown(each)
        case Eventually():
            yield from shown(step.step)
        case Change():
            pass


def readable(data: bytes) -> str:
    """Bytes as text where they are text, else as Python writes them."""
    text = data.decode("utf-8", "replace")
    return cut(text if text.isprintable() and "\ufffd" not in text else repr(data))


def told(answer: Answer) -> str:
    """An answer on one line: status, headers, body."""
    if "headers" not in answer or "status" not in answer:
        return cut(json.dumps(answer, ensure_ascii=False))
    headers = "".join(f" [{name}: {value}]" for name, value in answer["headers"].items())
    body = answer.get("text") if "text" in answer else json.dumps(answer["json"], ensure_ascii=False)
    tail = f" + {answer['tail']}" if "tail" in answer else ""
    return cut(f"{answer['status']}{headers} {body}{tail}")


def cut(text: str) -> str:
    """Shorten what is very long."""
    return text if len(text) <= WIDTH * 4 else f"{text[:WIDTH]} … ({len(text)} characters)"


def main() -> None:
    """Print the answers of the topics that are named, or of all."""
    chosen = [topic for topic in topics() if not sys.argv[1:] or topic.name in sys.argv[1:]]
    for scene, group in groupby(chosen, key=lambda topic: topic.scene):
        with tempfile.TemporaryDirectory() as scratch:
            server = start_triton(scene, Path(scratch))
            try:
                server.wait()
                print(f"# Scene {scene.name}: {' '.join(scene.flags) or 'no flags'}\n")
                for topic in group:
                    print(f"## {topic.name}: {topic.purpose}\n")
                    for name, steps in topic.exchanges.items():
                        if by_exchange().get(f"{topic.name}/{name}", ("",))[0] == NEVER:
                            continue
                        print(f"### {name}")
                        requests = [line for step in steps for line in shown(step)]
                        for request, answer in zip(requests, ask(server, steps), strict=False):
                            print(f"    > {request}\n    < {told(answer)}")
                        print()
            finally:
                server.stop()


if __name__ == "__main__":
    main()
