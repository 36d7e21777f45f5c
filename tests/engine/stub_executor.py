"""An executor without a model, for tests of the engine: it keeps tokens where the engine says and watches every step.

The next token of a sequence is a pure function of its token history, and the history is read back from the blocks that
the block table names. Wrong paging, a lost or doubled token, a neighbour's block, a slot that was not zeroed: each
shows as an AssertionError here or as tokens that differ from `expected_tokens`, which knows no engine.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from types import SimpleNamespace

import numpy as np

from deepinfer.config import EngineConfig
from deepinfer.engine.engine import Engine
from deepinfer.engine.output import RequestOutput
from deepinfer.engine.request import ModelInfo
from deepinfer.environ import Settings
from deepinfer.runner.inputs import CacheCapacity, StepBatch, StepResult
from deepinfer.sample.rows import SampledRows
from deepinfer.sampling_params import SamplingParams

POISON = -7
VOCAB = 97
EOS = (1, 5)
IMAGE = 90


def digest(history: Sequence[int], *salt: int) -> int:
    """A 64-bit number that depends on every token and every salt."""
    text = np.array([len(history), *history, *salt], dtype=np.int64).tobytes()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little")


def pick(history: Sequence[int], vocab: int, stream: int, banned: Sequence[int] = ()) -> tuple[int, float]:
    """(token, logprob) after `history`; `stream` is 0 for greedy, else the seed."""
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


class StubExecutor:
    """See the module.

    refuse    called with (history, sampled row) -> why this row has no token, or None
    fail_at   step ids whose launch raises
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
    ) -> None:
        self.capacity = CacheCapacity(num_blocks, num_slots, block_size)
        self.vocab, self.eos, self.sum_smaller, self.refuse = vocab, tuple(eos), sum_smaller, refuse
        self.fail_at: set[int] = set()
        self.batches: list[StepBatch] = []
        self.closed = 0
        self.zeroed: list[int] = []
        self._cells = np.full((num_blocks, block_size), POISON, dtype=np.int64)
        self._owner = np.zeros(num_blocks, dtype=np.int64)
        self._state: dict[int, list[int] | None] = {}  # tokens each slot has seen; None = must be zeroed first
        self._next_prompt_token: dict[int, int] = {}

    def zero_slots(self, slots: Sequence[int]) -> None:
        for slot in slots:
            assert 0 < slot < self.capacity.num_slots, slot
            self._state[slot] = []
            self._owner[self._owner == slot] = 0  # its former owner is gone
            self._next_prompt_token.pop(slot, None)
        self.zeroed += list(slots)

    def close(self) -> None:
        self.closed += 1

    def launch(self, batch: StepBatch) -> SimpleNamespace:
        if batch.step_id in self.fail_at:
            raise RuntimeError(f"injected failure in step {batch.step_id}")
        self._check_shapes(batch)
        self.batches.append(batch)
        histories, scores, row = [], {}, 0
        for i in range(batch.num_sequences):
            rows = slice(row, row + int(batch.q_lens[i]))
            row = rows.stop
            histories.append(self._run_sequence(batch, i, rows))
            if batch.prompt_logprobs[i]:
                scores[i] = self._scores(batch, i, rows, histories[i])
        result = StepResult(self._sample(batch, histories), scores)
        return SimpleNamespace(result=lambda: result)

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
        for name in ("temperature", "top_p", "top_k", "seed", "position", "num_top_logprobs", "forbid_eos", "golden"):
            assert len(getattr(batch.sampling, name)) == sampled, name
        assert len(set(batch.slots.tolist())) == n
        named = batch.block_table[batch.block_table > 0].tolist()
        assert len(named) == len(set(named)), "a block belongs to two sequences"
        assert (batch.token_ids >= 0).all()
        if batch.kind == "decode":
            assert (batch.q_lens == 1).all()
            assert batch.sampled.all()

    def _run_sequence(self, batch: StepBatch, i: int, rows: slice) -> list[int]:
        """Store the new tokens, and read the whole history back through the block table."""
        slot, start, end = int(batch.slots[i]), int(batch.q_starts[i]), int(batch.q_starts[i] + batch.q_lens[i])
        new = batch.token_ids[rows].tolist()
        state = self._state.get(slot)
        assert state is not None, f"slot {slot} is used without having been zeroed for its owner"
        assert len(state) == start, f"slot {slot} has {len(state)} tokens, the step starts at {start}"
        size = self.capacity.block_size
        blocks = batch.block_table[i, : -(-end // size)].tolist()
        assert 0 not in blocks, "a token would be stored in the null block"
        for position, token in zip(range(start, end), new, strict=True):
            block = blocks[position // size]
            if position % size == 0:
                self._take(block, slot)
            assert self._owner[block] == slot, f"block {block} belongs to slot {self._owner[block]}, not {slot}"
            self._cells[block, position % size] = token
        state += new
        history = self._cells[blocks].reshape(-1)[:end].tolist()
        assert history == state, f"slot {slot}: the blocks hold other tokens than were given"
        before = [-1, -1, -1, *history[:start]][-3:]
        assert batch.history[i].tolist() == before
        self._check_prompt(batch, i, rows, slot, start, end)
        return history

    def _take(self, block: int, slot: int) -> None:
        loser = int(self._owner[block])
        if loser and loser != slot:
            self._state[loser] = None  # whoever had the block must be gone
        self._owner[block] = slot
        self._cells[block] = POISON

    def _check_prompt(self, batch: StepBatch, i: int, rows: slice, slot: int, start: int, end: int) -> None:
        length = int(batch.data_lens[i])
        if batch.kind == "decode":
            assert length <= start
        else:
            assert end <= length
            assert not batch.sampled[i] or end == length
        expected = self._next_prompt_token.pop(slot, None)
        assert expected in (None, int(batch.token_ids[rows][0])), "prompt_targets of the chunk before were wrong"
        targets = batch.prompt_targets[rows]
        for row in range(len(targets) - 1):
            assert targets[row] in (-1, batch.token_ids[rows][row + 1])
        if targets[-1] >= 0:
            self._next_prompt_token[slot] = int(targets[-1])

    # --- results -----------------------------------------------------------------------------------------------------

    def _scores(self, batch: StepBatch, i: int, rows: slice, history: list[int]) -> np.ndarray:
        start = int(batch.q_starts[i])
        targets = batch.prompt_targets[rows].tolist()
        scores = [prompt_score(history[: start + j + 1], target) for j, target in enumerate(targets)]
        return np.array(scores, dtype=np.float32)

    def _sample(self, batch: StepBatch, histories: list[list[int]]) -> SampledRows:
        sampling, picked, errors = batch.sampling, [], []
        for row, i in enumerate(np.flatnonzero(batch.sampled).tolist()):
            history = histories[i]
            assert sampling.position[row] == len(history)
            banned = [*self.eos] if sampling.forbid_eos[row] else []
            if sampling.forbidden is not None:
                banned += sampling.forbidden[sampling.forbidden[:, 0] == row, 1].tolist()
            stream = int(sampling.seed[row]) if sampling.temperature[row] > 1e-4 else 0
            token, logprob = pick(history, self.vocab, stream, banned)
            token = int(sampling.golden[row]) if sampling.golden[row] >= 0 else token
            errors.append(self.refuse(history) if self.refuse is not None else None)
            picked.append((-1, 0.0) if errors[-1] else (token, logprob))
        tokens = np.array([token for token, _ in picked], dtype=np.int64)
        logprobs = np.array([logprob for _, logprob in picked], dtype=np.float32)
        count = int(sampling.num_top_logprobs.max(initial=0))
        top = (tokens[:, None] + np.arange(count)) % self.vocab if count else None
        return SampledRows(
            token_ids=tokens,
            logprobs=logprobs,
            top_ids=top,
            top_logprobs=None if top is None else (logprobs[:, None] - np.arange(count)).astype(np.float32),
            sum_smaller=np.full(len(tokens), 0.25, dtype=np.float32) if self.sum_smaller else None,
            error=errors,
        )


# --- engines around it ---

MODEL = ModelInfo(vocab_size=VOCAB, eos_ids=EOS, image_token_id=IMAGE)


def make_config(settings: Settings | None = None, **arguments: object) -> EngineConfig:
    """A resolved config for a model without limits."""
    defaults = {"max_model_len": 1024, "max_num_seqs": 8, "max_num_batched_tokens": 64}
    config = EngineConfig.create(settings or Settings(), model="stub", **(defaults | arguments))
    return config.resolve(SimpleNamespace(text=SimpleNamespace(max_position_embeddings=1 << 20, sliding_window=128)))


def make_engine(executor: StubExecutor | None = None, tokenizer: object = None, model: ModelInfo = MODEL, **arguments):
    """An engine over a stub; `arguments` are those of `EngineConfig`."""
    return Engine(make_config(**arguments), executor or StubExecutor(), tokenizer, model)


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
