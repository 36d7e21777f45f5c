"""Asks a model for outputs of a given form: JSON of a schema, a date, one of three words.

python examples/structured_output.py --model examples/tiny/checkpoints/v41-tiny-text
"""

from __future__ import annotations

import argparse
import sys

from deepinfer import LLM, SamplingParams
from deepinfer.cli.arguments import add_engine_arguments, engine_arguments
from deepinfer.so_args import StructuredOutput

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string"},
        "age": {"type": "integer"},
        "place": {"type": "string"},
        "items": {"type": "array", "items": {"type": "string"}},
    },
    "required": ["name", "age", "place", "items"],
}
REQUESTS = [
    (
        "Text: Paul is 9 years old, lives near the forest and owns cup, kite, ball.\nJSON:",
        StructuredOutput.json(PERSON),
    ),
    ("A date: ", StructuredOutput.regex(r"20\d\d-(0[1-9]|1[0-2])-[0-2][1-8]")),
    ("Is the sky blue? Answer: ", StructuredOutput.choice(["yes", "no", "perhaps"])),
]


def main() -> int:
    parser = argparse.ArgumentParser(description="Prints outputs of a given form.")
    add_engine_arguments(parser)
    prompts = [prompt for prompt, _ in REQUESTS]
    params = [
        SamplingParams(so_args=form, temperature=0, max_tokens=80, skip_special_tokens=True) for _, form in REQUESTS
    ]
    with LLM(**engine_arguments(parser.parse_args())) as llm:
        results = llm.generate(prompts, params)
    for result in results:
        print(f"{result.prompt!r}\n  {result.error or result.text}")
    return 1 if any(result.failed for result in results) else 0


if __name__ == "__main__":
    sys.exit(main())
