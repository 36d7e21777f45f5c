"""Long runs: thousands of requests of every kind, aborts at any moment, too little memory; after every step the books
balance, and in the end every request has exactly one result and nothing is held."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass, field

import pytest
from stub_executor import IMAGE, RestlessSchedule, StubExecutor, assert_idle, expected_tokens, make_engine, prompt_score

from deepinfer.engine.admission import Ask
from deepinfer.engine.engine import Engine
from deepinfer.engine.output import RequestOutput
from deepinfer.errors import EngineError
from deepinfer.sampling_params import SamplingParams

MAX_LEN = 120
BLOCK = 8


class Letters:
    """One letter a token, for stop strings."""

    def encode(self, text: str, add_bos: bool = True) -> list[int]:
        return [ord(char) for char in text]

    def decode(self, ids, skip_special_tokens: bool = False) -> str:
        return "".join(chr(33 + token % 26) for token in ids)

    def incremental(self, skip_special_tokens: bool = False) -> Letters:
        return self

    def push(self, ids) -> str:
        return self.decode(ids)

    def flush(self) -> str:
        return ""


@dataclass
class Traffic:
    """Random requests; prompts share beginnings, and some go on from earlier results."""

    random: random.Random
    count: int = 0
    texts: list[list[int]] = field(default_factory=list)
    asks: dict[str, Ask] = field(default_factory=dict)

    def prompt(self) -> list[int]:
        fresh = [self.random.randrange(6, 90) for _ in range(self.random.randint(1, 30))]
        known = self.random.choice(self.texts) if self.texts and self.random.random() < 0.7 else []
        text = (known[: self.random.randint(0, len(known))] + fresh)[: MAX_LEN + self.random.choice([-40, -20, -2, 3])]
        self.texts = [*self.texts[-30:], text]
        return text

    def ask(self) -> Ask:
        draw = self.random
        params = SamplingParams(
            temperature=draw.choice([0.0, 1.0]),
            seq_seed=draw.randint(1, 5),
            max_tokens=draw.choice([1, 3, 10, 40]),
            ignore_eos=draw.random() < 0.7,
            min_tokens=draw.choice([0, 0, 1]),
            stop_token_ids=draw.choice([(), (), (40, 41)]),
            stop=draw.choice([(), (), (), ("5", "AB")]),
            prompt_logprobs=draw.random() < 0.15,
            top_logprobs=draw.choice([0, 0, 2]),
        )
        self.count += 1
        return Ask(
            token_ids=self.prompt(), params=params, score_only=draw.random() < 0.05, priority=draw.choice([0, 0, 1, -1])
        )


@dataclass
class Soak:
    """One engine under traffic; `check` holds after every step."""

    engine: Engine
    traffic: Traffic
    results: dict[str, RequestOutput] = field(default_factory=dict)
    aborted: set[str] = field(default_factory=set)
    failed: set[str] = field(default_factory=set)

    def arrive(self) -> None:
        ask = self.traffic.ask()
        name = self.engine.add_request(ask, request_id=f"r{self.traffic.count}")
        self.traffic.asks[name] = ask
        self.take(self.engine.take_outputs())

    def abort(self) -> None:
        name = self.traffic.random.choice(list(self.traffic.asks))
        if self.engine.abort_request(name):
            self.aborted.add(name)
        self.take(self.engine.take_outputs())

    def fail(self) -> None:
        executor = self.engine._executor
        executor.fail_at = {self.engine._num_launched + 1}
        try:
            self.step()
        except EngineError:
            self.failed |= set(self.traffic.asks) - set(self.results)
            self.take(self.engine.take_outputs())
            assert_idle(self.engine)
        executor.fail_at = set()

    def step(self) -> None:
        self.take(self.engine.step())
        self.check()

    def take(self, outputs: list[RequestOutput]) -> None:
        for output in outputs:
            assert output.request_id not in self.results, "two results for one request"
            self.results[output.request_id] = output
            self.judge(output)
            self.traffic.texts.append(output.prompt_token_ids or [])
            if IMAGE not in output.token_ids:
                self.traffic.texts[-1] = self.traffic.texts[-1] + output.token_ids

    def judge(self, output: RequestOutput) -> None:
        """The result is what the request would get alone, or the beginning of it."""
        ask, name = self.traffic.asks.get(output.request_id), output.request_id
        if ask is None or (output.finish_reason == "error" and name not in self.failed):
            assert output.error is not None and (name in self.failed or not output.token_ids)
            return
        if ask.score_only:
            assert not output.token_ids
        tokens, _ = expected_tokens(ask.token_ids, ask.params, ask.params.seq_seed, MAX_LEN)
        assert output.token_ids == tokens[: len(output)]
        whole = output.finish_reason in ("stop", "length") and not ask.params.stop and not ask.score_only
        assert not whole or len(output) == len(tokens)
        assert output.finish_reason != "abort" or name in self.aborted
        if ask.params.prompt_logprobs and whole:
            wanted = [prompt_score(ask.token_ids[:i], ask.token_ids[i]) for i in range(1, len(ask.token_ids))]
            assert output.prompt_logprobs[1:] == wanted

    def check(self) -> None:
        """Owners and references of every block and slot agree; nobody is lost."""
        scheduler, live = self.engine.scheduler, list(self.engine._live.values())
        owners = live + scheduler.memory.deferred
        references = Counter(block for seq in owners for block in seq.blocks)
        assert 0 not in references
        assert all(scheduler.blocks.references(block) == count for block, count in references.items())
        assert len(references) == scheduler.blocks.num_used
        assert scheduler.blocks.num_free + scheduler.blocks.num_used == scheduler.blocks.num_total
        slots = [seq.slot for seq in owners if seq.slot]
        assert len(slots) == len(set(slots)) == scheduler.slots.num_used
        assert len(live) + len(self.results) == self.traffic.count
        if scheduler.prefix is not None:
            scheduler.prefix.cache.check(self.engine._executor.capacity.num_snapshots)
            shared = [block for block, count in references.items() if count > 1]
            scheduled = scheduler.table.scheduled
            complete = {block for seq in owners for block in seq.blocks[: int(scheduled[seq.slot]) // BLOCK]}
            assert complete.issuperset(shared)

    def run(self, requests: int, most_steps: int) -> int:
        """Serve so many requests; returns the steps it took."""
        draw, steps = self.traffic.random, 0
        while self.traffic.count < requests or self.engine.has_unfinished:
            steps += 1
            assert steps < most_steps, "requests starve"
            while self.traffic.count < requests and draw.random() < 0.5:
                self.arrive()
            if draw.random() < 0.05 and self.traffic.asks:
                self.abort()
            if draw.random() < 0.003 and self.engine.has_unfinished:
                self.fail()
            elif self.engine.has_unfinished:
                self.step()
        assert set(self.results) == set(self.traffic.asks)
        assert_idle(self.engine)
        return steps


def soak_engine(seed: int, **arguments) -> Engine:
    draw = random.Random(seed)
    drafts = draw.choice([0, 0, 2, 3])
    executor = StubExecutor(
        num_blocks=draw.choice([17, 25, 60]), num_slots=9, block_size=BLOCK, num_snapshots=draw.choice([1, 3, 12])
    )
    engine = make_engine(
        executor,
        Letters(),
        max_model_len=MAX_LEN,
        max_num_seqs=draw.randint(1, 6),
        max_num_batched_tokens=draw.choice([24, 60, 200]),
        use_nextn_decode=drafts,
        prefix_snapshot_interval=draw.choice([16, 1024]),
        stop_preempted_request=draw.random() < 0.2,
        **{"enable_prefix_caching": True, "zero_overhead_scheduling": draw.random() < 0.7, **arguments},
    )
    if drafts and draw.random() < 0.5:
        engine.scheduler.schedule = RestlessSchedule(seed)
    return engine


@pytest.mark.parametrize("mode", ["in order"], indirect=True)  # every engine here draws its own mode
@pytest.mark.parametrize("seed", range(10))
def test_two_thousand_requests(mode, seed):
    soak = Soak(soak_engine(seed), Traffic(random.Random(seed)))
    soak.run(200, most_steps=20_000)
    reasons = Counter(result.finish_reason for result in soak.results.values())
    assert reasons["abort"] and reasons["length"] and reasons["stop"]
    assert soak.engine.stats.cached_tokens > 0 or soak.engine._executor.capacity.num_snapshots < 12


# --- a model instead of the stub ---


def model_traffic(seed: int, count: int) -> list[Ask]:
    """Requests for the micro model: shared beginnings around the size of a block, every kind of request."""
    draw = random.Random(seed)
    stems = [[0] + [draw.randrange(3, 400) for _ in range(length - 1)] for length in (60, 129, 140)]
    asks = []
    for number in range(count):
        stem = draw.choice(stems)
        tokens = stem[: draw.choice([20, 129, len(stem)])] + [draw.randrange(3, 400) for _ in range(draw.randint(1, 9))]
        params = SamplingParams(
            temperature=draw.choice([0.0, 0.8]),
            seq_seed=number,
            max_tokens=draw.choice([1, 3, 6]),
            ignore_eos=draw.random() < 0.7,
            stop_token_ids=draw.choice([(), tuple(range(40, 80))]),
            prompt_logprobs=draw.random() < 0.1,
            top_logprobs=draw.choice([0, 2]),
        )
        asks.append(Ask(token_ids=tokens, params=params, score_only=number % 17 == 5, priority=draw.choice([0, 1])))
    return asks


def serve_model(directory, asks: list[Ask], abort: frozenset[int] = frozenset(), **arguments):
    """{number: result}, and the engine's totals; the requests `abort` are aborted after a few steps."""
    from deepinfer.config import EngineConfig
    from deepinfer.entrypoints.build import build_engine

    config = EngineConfig.create(model=str(directory), max_model_len=256, batch_invariant=True, **arguments)
    engine, _ = build_engine(config)
    results, steps = {}, 0
    try:
        for number, ask in enumerate(asks):
            engine.add_request(ask, request_id=str(number))
            for _ in range(number % 3):
                results |= {int(output.request_id): output for output in engine.step()}
            if number - 4 in abort:
                engine.abort_request(str(number - 4))
        while engine.has_unfinished:
            results |= {int(output.request_id): output for output in engine.step()}
            steps += 1
            assert steps < 5000, "requests starve"
        results |= {int(output.request_id): output for output in engine.take_outputs()}
        assert_idle(engine)
        return results, engine.stats
    finally:
        engine.close()


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["in order"], indirect=True)
def test_a_model_under_everything_at_once_gives_what_it_gives_one_by_one(mode, checkpoints):
    """Drafts, overlap, prefix cache, priorities, little memory and aborts against a plain engine: the same bits."""
    asks, gone = model_traffic(1, 40), frozenset({3, 11, 30})
    plain, _ = serve_model(checkpoints("micro"), asks, max_num_seqs=4, zero_overhead_scheduling=False)
    mixed, stats = serve_model(
        checkpoints("micro"), asks, gone, max_num_seqs=5, num_kv_blocks=8, max_num_batched_tokens=150,
        use_nextn_decode=2, enable_prefix_caching=True, num_prefix_snapshots=6,
    )  # fmt: skip
    assert set(plain) == set(mixed) == set(range(40))
    assert stats.cached_tokens > 0
    for number, a in plain.items():
        b = mixed[number]
        if number in gone and b.finish_reason == "abort":
            assert b.token_ids == a.token_ids[: len(b)], number
        else:
            assert (a.token_ids, a.logprobs, a.finish_reason) == (b.token_ids, b.logprobs, b.finish_reason), number
            assert a.prompt_logprobs == b.prompt_logprobs
