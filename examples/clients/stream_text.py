"""Has the model `babble` write a text, and prints each letter when it comes. Needs nothing but Python.

python examples/clients/stream_text.py "The sea" --length 200
"""

from __future__ import annotations

import argparse
import json
import urllib.request


def main() -> None:
    """Print the prompt, and what the server makes of it."""
    parser = argparse.ArgumentParser(description="have a model write, letter by letter")
    parser.add_argument("prompt", nargs="?", default="The s")
    parser.add_argument("--length", type=int, default=80)
    parser.add_argument("--url", default="localhost:8000")
    options = parser.parse_args()

    body = json.dumps({"prompt": options.prompt, "length": options.length}).encode()
    request = urllib.request.Request(f"http://{options.url}/v2/models/babble/generate_stream", body)
    print(options.prompt, end="", flush=True)
    with urllib.request.urlopen(request) as answer:
        for line in answer:
            if line.startswith(b"data: "):
                print(json.loads(line.removeprefix(b"data: "))["text"], end="", flush=True)
    print()


if __name__ == "__main__":
    main()
