"""Has the language model write JSON of a schema, with OpenAI's client.

pip install openai
python examples/llm/write_json.py ["there is a red circle in the middle" …]
"""

from __future__ import annotations

import argparse
import json

import openai
from lessons import COLOURS, SHAPES

TEXTS = ["there is a red circle at the top left", "there is a yellow square in the middle"]
THING = {
    "type": "object",
    "properties": {
        "colour": {"type": "string", "enum": list(COLOURS)},
        "shape": {"type": "string", "enum": list(SHAPES)},
        "place": {"type": "string", "maxLength": 30},
    },
    "required": ["colour", "shape", "place"],
    "additionalProperties": False,
}
"""Whatever the model would like to write, this is what comes."""


def main() -> None:
    """Print each text, and what the model has found in it."""
    parser = argparse.ArgumentParser(description="have the model write JSON")
    parser.add_argument("text", nargs="*", default=TEXTS)
    parser.add_argument("--url", default="localhost:8000", help="host and port of the server (default: %(default)s)")
    options = parser.parse_args()
    client = openai.OpenAI(base_url=f"http://{options.url}/v1", api_key="any")
    for text in options.text:
        completion = client.chat.completions.create(
            model="docent",
            messages=[{"role": "user", "content": f"As JSON: {text}."}],
            response_format={"type": "json_schema", "json_schema": {"name": "thing", "schema": THING}},
            temperature=0,
            max_tokens=80,
        )
        (choice,) = completion.choices
        if choice.finish_reason != "stop":
            # White space is JSON, too, and a model may go on with that.
            print(f"{text:45}(it did not come to an end)")
            continue
        thing = json.loads(choice.message.content)
        print(f"{text:45}{thing['colour']:8}{thing['shape']:10}{thing['place']}")


if __name__ == "__main__":
    main()
