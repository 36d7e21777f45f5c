"""An executor without a model, for tests of the engine: it keeps tokens where the engine says and watches every step.

Like a device it knows the newest token and the drafts of every slot before the engine does, so steps may be launched
ahead; drafts come from a script and are verified under the coupled rule.

The next token of a sequence is a pure function of its token history, and the history is read back from the blocks that
the block table names. Wrong paging, a lost or doubled token, a neighbour's block, a slot that was not zeroed: each
shows as an AssertionError here or as tokens that differ from `expected_tokens`, which knows no engine.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace

import numpy as np
import pytest

from deepinfer.config import EngineConfig
from deepinfer.engine.engine import Engine
from deepinfer.engine.output import RequestOutput
from deepinfer.engine.request import ModelInfo
from deepinfer.environ import Settings
from deepinfer.runner.inputs import CacheCapacity, DraftRows, StepBatch, StepResult
from deepinfer.sample.rows import SampledRows
from deepinfer.sampling_params import SamplingParams
from deepinfer.speculate.schedule import Choice, Outcome

POISON = -7
VOCAB = 97
EOS = (1, 5)
IMAGE = 90


def digest(history: Sequence[int], *salt: int) -> int:
    """A 64-bit number that depends on every token and every salt."""
    text = np.array([len(history), *history, *salt], dtype=np.int64).tobytes()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little")


def pick(
    history: Sequence[int], vocab: int, stream: int, banned: Sequence[int] = (), allowed: Sequence[int] | None = None
) -> tuple[int, float]:
    """(token, logprob) after `history`, one of `allowed` (None = all); `stream` is 0 for greedy, else the seed."""
    if allowed is not None:
        number, left = digest(history, stream & (2**62 - 1)), [token for token in allowed if token not in banned]
        assert left, "everything is banned"
        return left[number % len(left)], -float(number % 1009) / 128
    for attempt in range(1000):
        number = digest(history, stream & (2**62 - 1), attempt)
        if number % vocab not in banned:
            return number % vocab, -float(number % 1009) / 128
    raise AssertionError("everything is banned")


def prompt_score(prefix: Sequence[int], token: int) -> float:
    """Logprob of a prompt token after its prefix, exact in float32."""
    return -float(digest(prefix, token, 3) % 1009) / 128


def expected_tokens(
    prompt: Sequence[int], params: SamplingParams, seed: int = 0, max_model_len: int = 1024, vocab: int = VOCAB
) -> tuple[list[int], str]:
    """(tokens, finish reason) of a request served alone: a loop over `pick` and the stopping rules, nothing else."""
    history, output = list(prompt), []
    while True:
        banned = [*EOS] if len(output) < max(params.min_tokens, params.first_n_token_no_eos) else []
        banned += list(params.stop_token_ids) if len(output) < params.min_tokens else []
        forced = (params.golden_token_ids or ())[len(output) : len(output) + 1]
        token = pick(history, vocab, 0 if params.greedy else seed, banned)[0]
        token = forced[0] if forced and forced[0] >= 0 else token
        history.append(token)
        output.append(token)
        late = len(output) > params.min_tokens
        if token in EOS and not params.ignore_eos and len(output) > max(params.min_tokens, params.first_n_token_no_eos):
            return output, "stop"
        if late and token in params.stop_token_ids:
            return output, "stop"
        if len(output) == params.max_tokens or len(history) == max_model_len:
            return output, "length"


Script = Callable[[list[int], list[int]], list[int]]
"""(history with the newest token, the tokens that will follow) -> drafts, as many as there are tokens."""


def mixed_drafts(history: list[int], truth: list[int]) -> list[int]:
    """Right and wrong drafts in every pattern, decided by the history."""
    number = digest(history, 11)
    return [token if number >> 2 * i & 3 else (token + 1) % VOCAB for i, token in enumerate(truth)]


@dataclass
class SlotState:
    """What the device knows of a slot. tokens: those in its cache, None = must be zeroed first."""

    tokens: list[int] | None = None
    newest: int = POISON
    drafts: list[int] = field(default_factory=list)
    prompt_token: int | None = None
    copied: bool = False


class StubExecutor:
    """See the module.

    refuse      called with (history, sampled row) -> why this row has no token, or None
    script      proposes drafts
    fail_at     step ids whose launch raises
    num_drafts  drafts proposed for every next step; set by `make_engine`
    """

    def __init__(
        self,
        num_blocks: int = 65,
        num_slots: int = 17,
        block_size: int = 8,
        vocab: int = VOCAB,
        eos: Sequence[int] = EOS,
        sum_smaller: bool = False,
        refuse: Callable[[list[int]], str | None] | None = None,
        script: Script = mixed_drafts,
        num_snapshots: int = 0,
    ) -> None:
        self.capacity = CacheCapacity(num_blocks, num_slots, block_size, num_snapshots)
        self.vocab, self.eos, self.sum_smaller, self.refuse = vocab, tuple(eos), sum_smaller, refuse
        self.num_drafts, self.script = 0, script
        self.chooses = False
        self.fail_at: set[int] = set()
        self.batches: list[StepBatch] = []
        self.closed = 0
        self.zeroed: list[int] = []
        self.slots = [SlotState() for _ in range(num_slots + num_snapshots)]
        self._cells = np.full((num_blocks, block_size), POISON, dtype=np.int64)
        self._owner = np.zeros(num_blocks, dtype=np.int64)

    def zero_slots(self, slots: Sequence[int]) -> None:
        for slot in slots:
            assert 0 < slot < self.capacity.num_slots, slot
            self.slots[slot] = SlotState([])
            self._owner[self._owner == slot] = 0  # its former owner is gone
        self.zeroed += list(slots)

    def copy_slots(self, pairs: Sequence[tuple[int, int]]) -> None:
        """As on a device, a copy holds whatever the slot holds: with drafts perhaps refused tokens, too."""
        for source, target in pairs:
            assert (source < self.capacity.num_slots) != (target < self.capacity.num_slots)
            tokens = self.slots[source].tokens
            if target < self.capacity.num_slots:
                self._owner[self._owner == target] = 0
            self.slots[target] = SlotState(None if tokens is None else list(tokens), copied=True)

    def close(self) -> None:
        self.closed += 1

    def launch(self, batch: StepBatch) -> SimpleNamespace:
        if batch.step_id in self.fail_at:
            raise RuntimeError(f"injected failure in step {batch.step_id}")
        if batch.choose is not None:
            confidences = np.full((batch.num_sequences, self.num_drafts), 0.5, dtype=np.float32)
            batch = batch.narrowed(1 + np.minimum(batch.choose(confidences), batch.q_lens - 1))
        self._check_shapes(batch)
        self.batches.append(batch)
        if batch.masks is not None:
            batch.sampling.allowed_mask = batch.masks.result()
        run = self._prefill if batch.kind == "prefill" else self._decode
        result = run(batch)
        return SimpleNamespace(result=lambda: result)

    def pick(
        self, history: Sequence[int], stream: int, banned: Sequence[int] = (), allowed: Sequence[int] | None = None
    ) -> tuple[int, float]:
        """What the model says after `history`, as the function `pick`."""
        return pick(history, self.vocab, stream, banned, allowed)

    # --- steps -------------------------------------------------------------------------------------------------------

    def _prefill(self, batch: StepBatch) -> StepResult:
        rows, scores, row = _Rows(self, batch), {}, 0
        proposals: list[list[int]] = []
        for i in range(batch.num_sequences):
            part = slice(row, row + int(batch.q_lens[i]))
            row = part.stop
            state = self.slots[int(batch.slots[i])]
            assert state.tokens is not None, f"slot {batch.slots[i]} is used without having been zeroed for its owner"
            assert state.copied == (i in batch.prefixes)
            if state.copied:
                self._go_on(state, batch.prefixes[i].tolist())
            assert len(state.tokens) == batch.q_starts[i], f"slot {batch.slots[i]} has {len(state.tokens)} tokens"
            assert batch.history[i].tolist() == [-1, -1, -1, *state.tokens][-3:]
            self._check_prompt(batch, i, part, state)
            history = self._store(batch, i, state, batch.token_ids[part].tolist())
            self._take_snapshots(batch, i, state)
            if batch.prompt_logprobs[i]:
                scores[i] = self._scores(batch, i, part, history)
            if batch.sampled[i]:
                state.newest = rows.sample(history)
                proposals.append(self._propose(state, rows, batch.draft))
        return StepResult(rows.result(), scores, drafts=self._draft_rows(proposals) if batch.draft else None)

    def _decode(self, batch: StepBatch) -> StepResult:
        assert batch.sampled.all()
        rows, accepted, proposals = _Rows(self, batch), [], []
        for i, count in enumerate(batch.q_lens.tolist()):
            state = self.slots[int(batch.slots[i])]
            assert state.tokens is not None
            start = len(state.tokens)
            assert start <= batch.q_starts[i] if batch.optimistic else start == batch.q_starts[i]
            assert batch.data_lens[i] <= start
            fed = [state.newest, *state.drafts][:count]
            assert len(fed) == count, "a draft is verified that nobody made"
            history = self._store(batch, i, state, fed)
            found = [rows.sample(history[: start + j + 1]) for j in range(count)]
            agrees = [draft == token for draft, token in zip(state.drafts, found[:-1], strict=False)]
            kept = [*agrees, False].index(False)
            accepted.append(kept)
            del state.tokens[start + kept + 1 :]
            state.newest = found[kept]
            proposals.append(self._propose(state, rows, batch.draft))
        drafts = self._draft_rows(proposals) if batch.draft else None
        if not batch.optimistic:
            return StepResult(rows.result(), drafts=drafts)
        return StepResult(rows.result(), accepted=np.array(accepted), counts=batch.q_lens, drafts=drafts)

    def _go_on(self, state: SlotState, prefix: list[int]) -> None:
        """The slot is a copy made behind these tokens, or at most so far beyond that their windows are still there."""
        assert state.tokens is not None
        assert state.tokens[: len(prefix)] == prefix, "the snapshot belongs to another text"
        assert len(prefix) % self.capacity.block_size == 0
        assert len(state.tokens) - len(prefix) <= self.num_drafts, "the snapshot is too old for its windows"
        state.tokens, state.copied = list(prefix), False

    def _take_snapshots(self, batch: StepBatch, i: int, state: SlotState) -> None:
        assert state.tokens is not None
        for index, end, slot in batch.snapshots:
            if index == i:
                assert batch.q_starts[i] < end <= len(state.tokens)
                assert slot >= self.capacity.num_slots
                self.slots[slot] = SlotState(state.tokens[:end], copied=True)

    def _propose(self, state: SlotState, rows: _Rows, wanted: bool) -> list[int]:
        """Drafts for the next step of a slot, if any are wanted."""
        assert state.tokens is not None
        if not wanted:
            state.drafts = []
            return []
        truth, history = [], [*state.tokens, state.newest]
        while len(truth) < self.num_drafts:
            truth.append(self.pick(history + truth, rows.stream)[0])
        state.drafts = self.script(history, truth)
        return state.drafts

    def _draft_rows(self, proposals: list[list[int]]) -> DraftRows | None:
        if not self.num_drafts:
            return None
        assert all(len(drafts) == self.num_drafts for drafts in proposals)
        tokens = np.array(proposals, dtype=np.int64).reshape(-1, self.num_drafts)
        return DraftRows(tokens, np.full(tokens.shape, 0.5, dtype=np.float32))

    # --- checks ------------------------------------------------------------------------------------------------------

    def _check_shapes(self, batch: StepBatch) -> None:
        n, q, sampled = batch.num_sequences, batch.num_rows, int(batch.sampled.sum())
        assert n > 0
        assert q == batch.q_lens.sum()
        assert (batch.q_lens > 0).all()
        assert batch.history.shape == (n, 3)
        assert batch.block_table.shape[0] == n
        assert batch.prompt_targets.shape == (q,)
        for name in ("slots", "q_starts", "q_lens", "token_ids", "history", "data_lens", "prompt_targets"):
            assert getattr(batch, name).dtype == np.int64, name
        assert batch.block_table.dtype == np.int32
        assert batch.sampled.dtype == batch.prompt_logprobs.dtype == np.bool_
        rows = sampled if batch.kind == "prefill" else q
        for name in ("temperature", "top_p", "top_k", "seed", "position", "num_top_logprobs", "forbid_eos", "golden"):
            assert len(getattr(batch.sampling, name)) == rows, name
        assert len(set(batch.slots.tolist())) == n
        growing = np.arange(batch.block_table.shape[1]) >= batch.q_starts[:, None] // self.capacity.block_size
        named = batch.block_table[(batch.block_table > 0) & growing].tolist()
        complete = set(batch.block_table[~growing].tolist())
        assert len(named) == len(set(named)), "a block belongs to two sequences"
        assert complete.isdisjoint(named), "a block that others read is written"
        if batch.kind == "prefill":
            assert (batch.token_ids >= 0).all()
            assert not batch.optimistic
        else:
            assert (batch.token_ids == -1).all(), "the device knows the tokens of a decode step"
            assert self.num_drafts or not batch.optimistic
            assert batch.optimistic or (batch.q_lens == 1).all()
            assert (batch.q_lens <= 1 + self.num_drafts).all()
        assert batch.optimistic == (batch.sampling.ahead is not None)

    def _store(self, batch: StepBatch, i: int, state: SlotState, new: list[int]) -> list[int]:
        """Store the new tokens, and read the whole history back through the block table. Behind the last block of a
        sequence is the null block: rows there see poison."""
        slot, size = int(batch.slots[i]), self.capacity.block_size
        assert state.tokens is not None
        start = len(state.tokens)
        for position, token in enumerate(new, start):
            assert position // size < batch.block_table.shape[1], "the block table is too narrow"
            block = int(batch.block_table[i, position // size])
            if block == 0:
                assert batch.optimistic, "a token would be stored in the null block"
                continue
            if position % size == 0:
                self._take(block, slot)
            assert self._owner[block] == slot, f"block {block} belongs to slot {self._owner[block]}, not {slot}"
            self._cells[block, position % size] = token
        state.tokens += new
        blocks = batch.block_table[i, : -(-len(state.tokens) // size)].tolist()
        history = np.where(np.array(blocks)[:, None] > 0, self._cells[blocks], POISON).reshape(-1)[: len(state.tokens)]
        seen = history.tolist()
        assert all(a in (b, POISON) for a, b in zip(seen, state.tokens, strict=True)), "the blocks hold other tokens"
        assert batch.optimistic or POISON not in seen
        return seen

    def _take(self, block: int, slot: int) -> None:
        loser = int(self._owner[block])
        if loser and loser != slot:
            self.slots[loser].tokens = None  # whoever had the block must be gone
        self._owner[block] = slot
        self._cells[block] = POISON

    def _check_prompt(self, batch: StepBatch, i: int, rows: slice, state: SlotState) -> None:
        length, end = int(batch.data_lens[i]), int(batch.q_starts[i] + batch.q_lens[i])
        assert end <= length
        assert not batch.sampled[i] or end == length
        expected, state.prompt_token = state.prompt_token, None
        assert expected in (None, int(batch.token_ids[rows][0])), "prompt_targets of the chunk before were wrong"
        targets = batch.prompt_targets[rows]
        for row in range(len(targets) - 1):
            assert targets[row] in (-1, batch.token_ids[rows][row + 1])
        if targets[-1] >= 0 and end < length:
            state.prompt_token = int(targets[-1])

    def _scores(self, batch: StepBatch, i: int, rows: slice, history: list[int]) -> np.ndarray:
        start = int(batch.q_starts[i])
        targets = batch.prompt_targets[rows].tolist()
        scores = [prompt_score(history[: start + j + 1], target) for j, target in enumerate(targets)]
        return np.array(scores, dtype=np.float32)


class _Rows:
    """Samples the rows of a batch one after the other."""

    def __init__(self, executor: StubExecutor, batch: StepBatch) -> None:
        self.executor, self.sampling = executor, batch.sampling
        ahead = batch.sampling.ahead
        self.owners = None if ahead is None else np.repeat(np.arange(len(ahead.counts)), ahead.counts)
        assert ahead is None or ahead.counts.tolist() == batch.q_lens.tolist()
        self.picked: list[tuple[int, float]] = []
        self.errors: list[str | None] = []
        self.stream = 0

    def sample(self, history: list[int]) -> int:
        """The token behind `history` under the rules of the next row."""
        row, sampling, executor = len(self.picked), self.sampling, self.executor
        self.stream = int(sampling.seed[row]) if sampling.temperature[row] > 1e-4 else 0
        banned, golden = self._rules(row, len(history))
        token, logprob = executor.pick(history, self.stream, banned, self._allowed(row))
        token = golden if golden >= 0 else token
        token = POISON if POISON in history else token
        self.errors.append(executor.refuse(history) if executor.refuse is not None else None)
        self.picked.append((-1, 0.0) if self.errors[-1] else (token, logprob))
        return self.picked[-1][0]

    def _allowed(self, row: int) -> list[int] | None:
        """Ids that a mask leaves to a row, None without masks."""
        masks = self.sampling.allowed_mask
        if masks is None or (masks[row] == -1).all():
            return None
        bits = np.unpackbits(masks[row].view(np.uint8), bitorder="little")[: self.executor.vocab]
        return np.flatnonzero(bits).tolist()

    def _rules(self, row: int, position: int) -> tuple[list[int], int]:
        """Ids that are impossible at a position, and the forced one."""
        sampling, ahead = self.sampling, self.sampling.ahead
        if ahead is None:
            assert sampling.position[row] == position
            banned = [*self.executor.eos] if sampling.forbid_eos[row] else []
            if sampling.forbidden is not None:
                banned += sampling.forbidden[sampling.forbidden[:, 0] == row, 1].tolist()
            return banned, int(sampling.golden[row])
        assert self.owners is not None
        owner = int(self.owners[row])
        banned = [*self.executor.eos] if position < ahead.eos_from[owner] else []
        for sequence, token, until in [] if ahead.forbidden is None else ahead.forbidden.tolist():
            banned += [token] if sequence == owner and position < until else []
        if ahead.golden is None:
            return banned, -1
        place = position - int(ahead.golden_from[owner])
        assert place >= 0
        return banned, int(ahead.golden[owner, place]) if place < ahead.golden.shape[1] else -1

    def result(self) -> SampledRows:
        tokens = np.array([token for token, _ in self.picked], dtype=np.int64)
        logprobs = np.array([logprob for _, logprob in self.picked], dtype=np.float32)
        count = int(self.sampling.num_top_logprobs.max(initial=0))
        top = (tokens[:, None] + np.arange(count)) % self.executor.vocab if count else None
        return SampledRows(
            token_ids=tokens,
            logprobs=logprobs,
            top_ids=top,
            top_logprobs=None if top is None else (logprobs[:, None] - np.arange(count)).astype(np.float32),
            sum_smaller=np.full(len(tokens), 0.25, dtype=np.float32) if self.executor.sum_smaller else None,
            error=self.errors,
        )


class RestlessSchedule:
    """A verification schedule that changes its mind at every step: any number of drafts, and at times none is made."""

    def __init__(self, seed: int) -> None:
        self._random = np.random.default_rng(seed)

    def choose(self, choice: Choice) -> np.ndarray:
        assert len(choice.limits) == len(choice.confidences) == len(choice.record)
        return self._random.integers(0, choice.limits + 1)

    def draft_next(self) -> bool:
        return bool(self._random.integers(0, 4))

    def observe(self, outcome: Outcome) -> None:
        assert (outcome.accepted <= outcome.verified).all()


# --- engines around it ---

MODEL = ModelInfo(vocab_size=VOCAB, eos_ids=EOS, image_token_id=IMAGE)


@dataclass(frozen=True)
class Mode:
    """How steps follow each other: planned ahead or not, and drafts a sequence."""

    overlap: bool = False
    drafts: int = 0


MODES = {"in order": Mode(), "overlap": Mode(True), "drafts": Mode(True, 3), "drafts in order": Mode(False, 2)}
IN_ORDER = pytest.mark.parametrize("mode", ["in order"], indirect=True)
PLAIN = pytest.mark.parametrize("mode", ["in order", "overlap"], indirect=True)
"""Marks of tests that count steps: in one mode only, or in those without drafts."""

CURRENT = [MODES["in order"]]
"""The mode of engines and executors made now; set by the fixture `mode`."""


def make_config(settings: Settings | None = None, **arguments: object) -> EngineConfig:
    """A resolved config for a model without limits."""
    defaults = {"max_model_len": 1024, "max_num_seqs": 8, "max_num_batched_tokens": 64}
    mode = CURRENT[-1]
    given = defaults | arguments
    drafts = min(mode.drafts, given["max_num_batched_tokens"] // given["max_num_seqs"] - 1)  # what a step has room for
    defaults |= {"zero_overhead_scheduling": mode.overlap, "use_nextn_decode": max(0, drafts)}
    config = EngineConfig.create(settings or Settings(), model="stub", **(defaults | arguments))
    return config.resolve(SimpleNamespace(text=SimpleNamespace(max_position_embeddings=1 << 20, sliding_window=128)))


def make_engine(executor: StubExecutor | None = None, tokenizer: object = None, model: ModelInfo = MODEL, **arguments):
    """An engine over a stub; `arguments` are those of `EngineConfig`."""
    executor, config = executor or StubExecutor(), make_config(**arguments)
    executor.num_drafts = config.num_draft_tokens
    return Engine(config, executor, tokenizer, model)


def run_all(engine: Engine, limit: int = 10_000) -> dict[str, RequestOutput]:
    """Step until nothing is left; {request id: result}. Each result appears once."""
    results: dict[str, RequestOutput] = {output.request_id: output for output in engine.take_outputs()}
    for _ in range(limit):
        if not engine.has_unfinished:
            return results
        for output in engine.step():
            assert output.request_id not in results, f"two results for {output.request_id}"
            results[output.request_id] = output
    raise AssertionError(f"not finished after {limit} steps")


def assert_idle(engine: Engine) -> None:
    """Nothing is held: every block and slot is back in its pool."""
    scheduler = engine.scheduler
    assert (scheduler.blocks.num_used, scheduler.slots.num_used) == (0, 0)
    assert (scheduler.num_running, scheduler.num_waiting, engine.num_unfinished) == (0, 0, 0)
