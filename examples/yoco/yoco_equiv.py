"""Do truncated prefills agree? Compares the modes mask and compact on real prompts, token by token.

    python examples/yoco/yoco_equiv.py --model DIR [--keep 140] [--prompts FILE] [--max-tokens 16]

With DEEPINFER_YOCO_PREFILL_TRUNCATION_MODE=compact the decoder half of the model computes only the last KEEP tokens of
a prompt; mask computes all rows and hides the same keys, and is the reference. Each prompt is also computed in small
chunks and, with the prefix cache, from where the one before left off. Everything must agree bit for bit (sums are made
order-free with DEEPINFER_BATCH_INVARIANT=1). Exit code 0: equal; 1: a difference, which is printed.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import NamedTuple

from deepinfer import LLM, SamplingParams

PROMPTS = (
    "The tide tables for the estuary are printed every winter. They list high and low water for each day of the year, "
    "the height of the water in decimetres, and the hour at which the current turns. " * 2,
    "def merge(left, right):\n    result = []\n    while left and right:\n        result.append((left if left[0] <= "
    "right[0] else right).pop(0))\n    return result + left + right\n\n\ndef test_merge():\n    assert merge([1, 4], "
    "[2, 3]) == [1, 2, 3, 4]\n    assert merge([], [5]) == [5]\n" * 2,
    "Question: a tram leaves every twelve minutes from six in the morning. How many have left by a quarter past nine? "
    "Answer: between 6:00 and 9:15 lie 195 minutes, which is sixteen times twelve and three more. The first leaves at "
    "six itself, so seventeen trams have left.\n" * 2,
    "Short prompts are not truncated.",
)


class Run(NamedTuple):
    """One way of computing the prompts."""

    name: str
    mode: str
    arguments: dict[str, object]


def runs(modes: list[str], chunk: int) -> list[Run]:
    """Every mode in one piece, in chunks, and with the prefix cache."""
    ways: list[tuple[str, dict[str, object]]] = [
        ("whole", {}),
        (f"chunks of {chunk}", {"max_num_batched_tokens": chunk}),
        ("prefix cache", {"enable_prefix_caching": True}),
    ]
    return [Run(f"{mode}, {name}", mode, arguments) for mode in modes for name, arguments in ways]


def compute(run: Run, options: argparse.Namespace, prompts: list[str]) -> list[tuple[list[int], list[float]]]:
    """(tokens, logprobs) of each prompt; each text is submitted twice, so that the second can go on from the first."""
    params = SamplingParams(temperature=0, max_tokens=options.max_tokens, ignore_eos=True)
    with LLM(
        options.model, accelerator=options.accelerator, max_num_seqs=8, batch_invariant=True,
        yoco_prefill_truncation_mode=run.mode, yoco_prefill_keep_tokens=options.keep, **run.arguments,
    ) as llm:  # fmt: skip
        twice = [llm.generate(prompts, params, use_tqdm=False) for _ in range(1 + bool(run.arguments))]
    for output in twice[-1]:
        if output.error is not None:
            raise SystemExit(f"{run.name}: {output.error}")
    return [(output.token_ids, output.logprobs) for output in twice[-1]]


def difference(expected: tuple[list[int], list[float]], found: tuple[list[int], list[float]]) -> str | None:
    """The first token in which two results differ, None if they are equal."""
    for place, (a, b, p, q) in enumerate(zip(expected[0], found[0], expected[1], found[1], strict=True)):
        if a != b or p != q:
            return f"token {place}: {b} (logprob {q:.9g}), expected {a} (logprob {p:.9g})"
    return None


def main(arguments: list[str] | None = None) -> int:
    """Compare; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="directory of a checkpoint, or a hub id")
    parser.add_argument("--keep", type=int, default=140, help="prompt tokens the decoder half computes")
    parser.add_argument("--modes", nargs="+", default=["mask", "compact"], choices=["off", "mask", "compact"])
    parser.add_argument("--prompts", type=Path, help="text file, one prompt a line (default: a few built in)")
    parser.add_argument("--max-tokens", type=int, default=16)
    parser.add_argument("--chunk", type=int, default=50, help="tokens of a step where prompts are cut")
    parser.add_argument("--accelerator", help="backend (default: probe the machine)")
    options = parser.parse_args(arguments)
    prompts = list(PROMPTS) if options.prompts is None else options.prompts.read_text().splitlines()
    first, *others = runs(options.modes, options.chunk)
    expected = compute(first, options, prompts)
    differences = 0
    for run in others:
        found = compute(run, options, prompts)
        wrong = {at: text for at, pair in enumerate(zip(expected, found, strict=True)) if (text := difference(*pair))}
        differences += len(wrong)
        print(f"{run.name}: {len(prompts) - len(wrong)} of {len(prompts)} prompts equal to {first.name}")
        for at, text in wrong.items():
            print(f"  prompt {at}, {text}")
    return 1 if differences else 0


if __name__ == "__main__":
    sys.exit(main())
