"""Level 4: a whole engine on the backend against one on core's reference, and against itself.

Log-probabilities and greedy tokens follow the reference; how a text is cut into steps, who else is in the batch,
truncation and preemption change nothing. What this version of core cannot do yet is skipped with core's own message,
and runs by itself as soon as it can.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import cached_property, lru_cache
from typing import Any

from deepinfer.entrypoints.llm import LLM
from deepinfer.environ import variable_of
from deepinfer.errors import UnsupportedError
from deepinfer.sampling_params import SamplingParams
from deepinfer.testing.conformance import deviation, runs
from deepinfer.testing.conformance.deviation import Noise
from deepinfer.testing.conformance.runs import CALM, MICRO, Forced, Script
from deepinfer.testing.opinfo.record import OpInfo
from deepinfer.testing.results import Case, CaseResult, Failure, Skip, Worst
from deepinfer.testing.subject import IN_PROCESS, Subject, load_groups

LEVEL = 4

Infos = Mapping[str, OpInfo]

LENGTHS, TOKENS = (5, 37, 150, 260), 12
QUICK_LENGTHS, QUICK_TOKENS = (5, 37, 140), 6
"""Prompt lengths below and above the window, the paged block of 128 tokens, and a step."""


def cases(subject: Subject, infos: Infos, quick: bool = False) -> Iterator[Case]:
    """The cases of level 4; `infos` changes nothing. quick: fewer and shorter texts."""
    bench = EngineBench(subject, quick)
    bodies: dict[str, Callable[[], Worst | str | None]] = {
        "log-probabilities follow the reference": lambda: bench.follows(CALM),
        "greedy tokens follow the reference": bench.greedy,
        "the same run twice": bench.repeatable,
        "chunked = unchunked prefill": bench.chunked,
        "alone = in a batch": bench.alone,
        "mask = compact truncation": bench.truncation,
        "preemption changes nothing": bench.preemption,
        "batch-invariant mode is bitwise": bench.invariant,
        "equal seeds, equal samples": bench.seeds,
        "drafts on = off": bench.drafts,
        "data parallel 1 = 2": lambda: bench.ranks("data_parallel_size"),
        "context parallel 1 = 2": lambda: bench.ranks("context_parallel_size"),
        "expert parallel 1 = 2": lambda: bench.ranks("expert_parallel_size"),
        "graphs on = off": bench.graphs,
        "structured output is legal": bench.structured,
    }
    if not quick:
        bodies["log-probabilities follow the reference, selecting entries"] = lambda: bench.follows(MICRO)
    for name, body in bodies.items():
        yield Case(LEVEL, None, name, body)


def run(subject: Subject, infos: Infos, quick: bool = False) -> Iterator[CaseResult]:
    """Run them."""
    return (case.run() for case in cases(subject, infos, quick))


class EngineBench:
    """Engines of the subject and of the reference on the same checkpoints, and the runs that several cases share."""

    def __init__(self, subject: Subject, quick: bool) -> None:
        self.subject, self.quick = subject, quick
        self.baseline = load_groups(name="baseline")
        self.checkpoints = runs.Checkpoints(subject.seed)
        lengths, tokens = (QUICK_LENGTHS, QUICK_TOKENS) if quick else (LENGTHS, TOKENS)
        vocabulary = runs.configuration(CALM).text.vocab_size
        self.script = Script.make(lengths, tokens, vocabulary, subject.seed)
        self.short_script = Script.make(QUICK_LENGTHS, QUICK_TOKENS, vocabulary, subject.seed)
        self.tokens = tokens
        self.reference = lru_cache(self._reference)

    def engine(self, checkpoint: str = CALM, **arguments: Any) -> AbstractContextManager[LLM]:
        """An engine of the subject."""
        subject, place = self.subject, self.checkpoints.path(checkpoint)
        return runs.engine(place, subject.loaded, subject.context.settings, op_overrides=subject.overrides, **arguments)

    def _reference(self, checkpoint: str) -> tuple[Forced, Noise]:
        """The order-free reference's run, and the noise of the working one."""
        place, made = self.checkpoints.path(checkpoint), []
        for order_free in (False, True):
            with runs.engine(place, self.baseline, batch_invariant=order_free) as llm:
                made.append(runs.forced(llm, self.script))
        working, ideal = made
        return ideal, Noise.between(working, ideal)

    @cached_property
    def plain(self) -> Forced:
        """The subject's run with default settings."""
        with self.engine() as llm:
            return runs.forced(llm, self.script)

    @property
    def noise(self) -> Noise:
        return self.reference(CALM)[1]

    # against the reference

    def follows(self, checkpoint: str) -> Worst:
        ideal, noise = self.reference(checkpoint)
        if checkpoint == CALM:
            return deviation.hold(self.plain, ideal, noise)
        with self.engine(checkpoint) as llm:
            return deviation.hold(runs.forced(llm, self.script), ideal, noise)

    def greedy(self) -> str:
        prompts = self.script.prompts
        with runs.engine(self.checkpoints.path(CALM), self.baseline, batch_invariant=True) as llm:
            expected = runs.greedy(llm, prompts, self.tokens)
            script = replace(self.script, forced=tuple(expected))
            reference = runs.forced(llm, script, score_prompts=False)
        with self.engine() as llm:
            chosen, along = runs.greedy(llm, prompts, self.tokens), runs.forced(llm, script, score_prompts=False)
        return deviation.hold_tokens(chosen, along, expected, reference, self.noise)

    # against itself

    def repeatable(self) -> None:
        wavering = [name for name in self.subject.native if not self._declares(name, "deterministic")]
        if wavering:
            raise Skip(f"not declared deterministic: {', '.join(wavering)}")
        with self.engine() as llm:
            for _ in range(2):  # in another engine, and once more in that one
                deviation.same(runs.forced(llm, self.script), self.plain)

    def _declares(self, op: str, flag: str) -> bool:
        from deepinfer.hooks.api import provides_of

        declared = provides_of(self.subject.ops.binding(op).function)
        return declared is not None and getattr(declared, flag)

    def chunked(self) -> Worst:
        with self.engine(max_num_batched_tokens=48) as llm:
            return deviation.hold(runs.forced(llm, self.script), self.plain, self.noise)

    def alone(self) -> Worst:
        with self.engine(max_num_seqs=1) as llm:
            return deviation.hold(runs.forced(llm, self.script), self.plain, self.noise)

    def truncation(self) -> Worst:
        made = []
        for mode in ("mask", "compact"):
            with self.engine(yoco_prefill_truncation_mode=mode, yoco_prefill_keep_tokens=24) as llm:
                made.append(runs.forced(llm, self.script, score_prompts=False))
        return deviation.hold(made[1], made[0], self.noise)

    def preemption(self) -> Worst:
        """Prompts that fill their blocks, in a cache that cannot hold what they grow to."""
        script = Script.make((126, 125, 124), 6, runs.configuration(CALM).text.vocab_size, self.subject.seed)
        with self.engine(max_num_seqs=3, max_model_len=256) as llm:
            roomy = runs.forced(llm, script, score_prompts=False)
        with self.engine(max_num_seqs=3, max_model_len=256, num_kv_blocks=3) as llm:
            tight = runs.forced(llm, script, score_prompts=False)
        if not tight.preempted:
            raise Failure("no sequence was preempted, though the cache cannot hold them all")
        return deviation.hold(tight, roomy, self.noise)

    def invariant(self) -> str:
        made = []
        variants: tuple[dict[str, Any], ...] = ({}, {"max_num_batched_tokens": 48}, {"max_num_seqs": 1})
        for arguments in variants:
            with self.engine(batch_invariant=True, **arguments) as llm:
                made.append(runs.forced(llm, self.short_script))
        for other in made[1:]:
            deviation.same(other, made[0])
        native = [name for name in self.subject.native if self._declares(name, "batch_invariant")]
        return f"{len(native)} of {len(self.subject.native)} native ops declare it, the others are core's there"

    def seeds(self) -> None:
        with self.engine() as llm:
            first, second = (runs.sampled(llm, self.script.prompts, self.tokens) for _ in range(2))
        if first != second:
            raise Failure(f"equal seeds gave different tokens: {first} and {second}")

    # what core cannot do yet

    def drafts(self) -> Worst:
        return self._with({"use_nextn_decode": 2})

    def ranks(self, argument: str) -> Worst:
        if self.subject.loaded.entry.distribution == IN_PROCESS:
            raise Skip("the backend was given as an object, which other processes cannot open")
        return self._with({argument: 2})

    def graphs(self) -> Worst:
        if not self.subject.ops.runtime.capabilities().supports_graphs:
            raise Skip("its runtime captures no graphs")
        if not variable_of("enforce_eager").active:
            raise Skip("this version of core runs without graphs")
        return self._with({"enforce_eager": True})

    def _with(self, arguments: dict[str, Any]) -> Worst:
        """The plain run with other arguments; skipped where core refuses them as not available."""
        try:
            with self.engine(**arguments) as llm:
                return deviation.hold(runs.forced(llm, self.script), self.plain, self.noise)
        except UnsupportedError as error:
            raise Skip(str(error)) from None

    def structured(self) -> str:
        params = SamplingParams(so_args={"schema_type": "regex", "schema": "(ab)+"}, max_tokens=8, temperature=0.0)
        with self.engine() as llm:
            outputs: list[Any] = llm.generate(prompt_token_ids=[[0, 5, 6]], sampling_params=params, use_tqdm=False)
        output = outputs[0]
        if output.error is not None and "not installed" in str(output.error):
            raise Skip(str(output.error))
        if output.error is not None or set(output.text) - set("ab"):
            raise Failure(f"asked for (ab)+, got {output.text!r} {output.error or ''}")
        return output.text
