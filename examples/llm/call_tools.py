"""Has the language model call a tool, with OpenAI's client: a function of this program, which it asks for by name.

pip install openai
python examples/llm/call_tools.py ["What is the weather in Paris?" …]
"""

from __future__ import annotations

import argparse
import json

import openai
from lessons import WEATHER

QUESTIONS = ["What is the weather in Oslo?", "How is the weather in Rome?"]
SKIES = {"Athens": "sunny", "Berlin": "windy", "Cairo": "sunny", "London": "rainy", "Oslo": "snowy", "Rome": "stormy"}


def weather(city: str) -> str:
    """Return what the sky looks like over a city. Yours would ask somebody who knows."""
    return SKIES.get(city, "cloudy")


FUNCTIONS = {"weather": weather}


def main() -> None:
    """Print each question, what the model calls, and what it says in the end."""
    parser = argparse.ArgumentParser(description="have the model call a tool")
    parser.add_argument("question", nargs="*", default=QUESTIONS)
    parser.add_argument("--url", default="localhost:8000", help="host and port of the server (default: %(default)s)")
    options = parser.parse_args()
    client = openai.OpenAI(base_url=f"http://{options.url}/v1", api_key="any")
    for question in options.question:
        print(question)
        print(f"    {answer(client, question)}")


def answer(client: openai.OpenAI, question: str) -> str:
    """Ask; do what the model calls for, tell it what came of it, and return what it makes of that."""
    messages = [{"role": "user", "content": question}]
    for _ in range(4):  # a model may call for ever
        completion = client.chat.completions.create(
            model="docent", messages=messages, tools=[WEATHER], temperature=0, max_tokens=60
        )
        message = completion.choices[0].message
        if not message.tool_calls:
            return message.content
        messages.append(message.to_dict())
        for call in message.tool_calls:
            result = called(call.function.name, call.function.arguments)
            print(f"    {call.function.name}({call.function.arguments}) -> {result}")
            messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
    return "(it did not come to an end)"


def called(name: str, arguments: str) -> str:
    """Return what a call gives, or what is wrong with it: the model is told either way, and may write anything."""
    if name not in FUNCTIONS:
        return f"there is no tool {name}"
    try:
        return FUNCTIONS[name](**json.loads(arguments))
    except TypeError as error:
        return str(error)


if __name__ == "__main__":
    main()
