"""Completes a few prompts with DeepInfer and prints the texts: the shortest useful program.

    python examples/offline_inference.py                              # the published checkpoint, from the hub
    DEEPINFER_HF_MODEL_DIR=/data/ckpt python examples/offline_inference.py     # a local copy of it
    python examples/offline_inference.py --model /tmp/tiny --max-tokens 32 "My own prompt"

`--ep N`, `--dp N` and `--cp N` set the sizes of the expert, data and context parallel groups.
"""

from __future__ import annotations

import argparse
import sys
import time

from deepinfer import LLM, SamplingParams
from deepinfer.cli.arguments import add_engine_arguments, add_sampling_arguments, engine_arguments, sampling_arguments
from deepinfer.errors import DeepInferError

PROMPTS = [
    "Once upon a time",
    "The three laws of thermodynamics are",
    "def fibonacci(n):",
    "1, 1, 2, 3, 5, 8,",
    "Die Hauptstadt von Frankreich ist",
    "A recipe for pancakes:",
]


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Completes prompts and prints the texts.")
    parser.add_argument("prompts", nargs="*", default=PROMPTS, help="texts to continue (default: six built-in ones)")
    add_sampling_arguments(parser, max_tokens=32)
    add_engine_arguments(parser)
    for flag, name in (("--ep", "expert"), ("--dp", "data"), ("--cp", "context")):
        parser.add_argument(
            flag, dest=f"{name}_parallel_size", type=int, default=argparse.SUPPRESS, metavar="N",
            help=f"short for --{name}-parallel-size",
        )  # fmt: skip
    return parser.parse_args()


def main() -> int:
    args = parse_arguments()
    with LLM(**engine_arguments(args)) as llm:
        started = time.perf_counter()
        params = SamplingParams(**sampling_arguments(args), skip_special_tokens=True)
        results = llm.generate(args.prompts, params, use_tqdm=True)
        seconds = time.perf_counter() - started
    for result in results:
        print(f"\nPrompt: {result.prompt!r}")
        print(f"Error:  {result.error}" if result.error else f"Text:   {result.text!r} ({result.finish_reason})")
    tokens = sum(len(result) for result in results)
    print(f"\n{len(results)} prompts, {tokens} tokens in {seconds:.1f} s ({tokens / seconds:.1f} tokens/s)")
    return 1 if any(result.error for result in results) else 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except DeepInferError as error:
        sys.exit(f"offline_inference: {error}")
