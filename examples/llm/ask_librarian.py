"""Has questions answered from passages that are looked up: prints the answer as it is written, and the passages.

pip install nerite
python examples/llm/ask_librarian.py ["a question of your own" …]
"""

from __future__ import annotations

import argparse
import json

from nerite.client import Client

QUESTIONS = ["How do I quote a string for the shell?", "How can I shuffle a list?", "What does math.isqrt do?"]
HOW = json.dumps({"temperature": 0, "max_tokens": 80})


def main() -> None:
    """Print each question, its answer, and the passages that it is made from."""
    parser = argparse.ArgumentParser(description="ask the librarian")
    parser.add_argument("question", nargs="*", default=QUESTIONS)
    parser.add_argument("--url", default="localhost:8000", help="host and port of the server (default: %(default)s)")
    options = parser.parse_args()
    with Client(options.url) as client:
        for question in options.question:
            print(question, end="\n    ")
            inputs = {"text_input": question, "stream": True, "sampling_parameters": HOW}
            for response in client.stream("librarian", inputs):
                print(response["text_output"], end="", flush=True)
            # Had again for those who want to know; the librarian does not say what it has read.
            passages = client.infer("search", {"text_input": question}, outputs=["passages"])["passages"]
            print("".join(f"\n        [{number}] {text.decode()}" for number, text in enumerate(passages, 1)))


if __name__ == "__main__":
    main()
