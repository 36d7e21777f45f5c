"""The engine under random arrivals, aborts, failures and memory pressure: a state machine with the stub as judge."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from stub_executor import RestlessSchedule, StubExecutor, assert_idle, expected_tokens, make_engine, prompt_score

from deepinfer.errors import EngineError
from deepinfer.sampling_params import SamplingParams

MAX_LEN = 60
PROMPTS = st.lists(st.integers(6, 89), min_size=1, max_size=MAX_LEN + 2)
PARAMS = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.0, 1.0]),
    seq_seed=st.integers(1, 3),
    max_tokens=st.integers(5, 30),
    ignore_eos=st.booleans(),
    min_tokens=st.integers(0, 5),
    stop_token_ids=st.sampled_from([(), (40, 41, 42, 43)]),
    prompt_logprobs=st.booleans(),
    top_logprobs=st.sampled_from([0, 0, 3]),
)


class EngineWalk(RuleBasedStateMachine):
    """Invariants of every step are checked by the stub; here: results, memory, order, progress."""

    @initialize(
        num_blocks=st.integers(3, 25),
        block_size=st.sampled_from([4, 8]),
        num_seqs=st.integers(1, 6),
        budget=st.integers(6, 40),
        stop_preempted=st.sampled_from([False, False, True]),
        overlap=st.booleans(),
        drafts=st.sampled_from([0, 0, 1, 2, 5]),
        restless=st.sampled_from([None, None, "early", "late"]),
    )
    def start(self, num_blocks, block_size, num_seqs, budget, stop_preempted, overlap, drafts, restless):
        self.executor = StubExecutor(num_blocks=num_blocks, num_slots=num_seqs + 2, block_size=block_size)
        self.engine = make_engine(
            self.executor,
            max_model_len=MAX_LEN,
            max_num_seqs=num_seqs,
            max_num_batched_tokens=max(budget, num_seqs * (1 + drafts)),
            stop_preempted_request=stop_preempted,
            zero_overhead_scheduling=overlap,
            use_nextn_decode=drafts,
        )
        if restless is not None and drafts:
            self.engine.scheduler.schedule = RestlessSchedule(num_blocks)
            self.engine.scheduler._choose_late = restless == "late"
        self.requests: dict[str, tuple[list[int], SamplingParams]] = {}
        self.results: dict = {}
        self.aborted: set[str] = set()
        self.failed: set[str] = set()

    def take(self, outputs) -> None:
        for output in outputs:
            assert output.request_id not in self.results, "two results for one request"
            self.results[output.request_id] = output
            self.check(output)

    def advance(self) -> None:
        self.take(self.engine.step())
        self.memory_belongs_to_live_sequences()

    def check(self, output) -> None:
        prompt, params = self.requests[output.request_id]
        room = (self.executor.capacity.num_blocks - 1) * self.executor.capacity.block_size
        if len(prompt) >= MAX_LEN or len(prompt) > room:
            assert output.finish_reason == "error"
            assert str(len(prompt)) in str(output.error)
            return
        tokens, reason = expected_tokens(prompt, params, params.seq_seed, MAX_LEN)
        assert len(prompt) + len(output) <= MAX_LEN
        assert len(output.logprobs) == len(output)
        assert params.top_logprobs == 0 or len(output.top_logprobs) == len(output)
        if output.finish_reason == reason and output.error is None:
            assert output.token_ids == tokens
            self.check_scores(output, prompt, params)
        else:
            assert output.token_ids == tokens[: len(output)]
            assert output.finish_reason in ("abort", "error", "insufficient_system_resource")
            assert (output.finish_reason == "abort") == (output.request_id in self.aborted)
            assert output.finish_reason != "error" or output.request_id in self.failed

    def check_scores(self, output, prompt, params) -> None:
        if not params.prompt_logprobs:
            assert output.prompt_logprobs is None
            return
        assert output.prompt_logprobs[0] is None
        assert output.prompt_logprobs[1:] == [prompt_score(prompt[:i], prompt[i]) for i in range(1, len(prompt))]

    @rule(prompt=PROMPTS, params=PARAMS)
    def arrive(self, prompt, params):
        name = self.engine.add_request(token_ids=prompt, params=params, request_id=f"r{len(self.requests)}")
        self.requests[name] = (prompt, params)
        self.take(self.engine.take_outputs())

    @rule(count=st.integers(1, 12))
    def step(self, count):
        for _ in range(count):
            self.advance()

    @rule(pick=st.integers(0, 10**6))
    def abort(self, pick):
        if not self.requests:
            return
        name = sorted(self.requests)[pick % len(self.requests)]
        self.aborted |= {name} - set(self.results)
        assert self.engine.abort_request(name) == ([] if name in self.results else [name])
        self.take(self.engine.take_outputs())

    @rule()
    def fail(self):
        """The executor breaks at the next launch; if nothing has to be launched any more, nothing breaks."""
        self.executor.fail_at = {len(self.executor.batches) + self.failures + 1}
        try:
            while self.engine.has_unfinished:
                self.advance()
        except EngineError:
            self.failures += 1
            self.failed |= set(self.requests) - set(self.results)
            self.take(self.engine.take_outputs())
        self.executor.fail_at = set()
        assert_idle(self.engine)

    failures = 0

    @invariant()
    def memory_belongs_to_live_sequences(self):
        if not hasattr(self, "engine"):
            return
        scheduler, live = self.engine.scheduler, list(self.engine._live.values())
        owners = live + scheduler.memory.deferred  # ended, but a step in flight has their rows
        blocks = [block for seq in owners for block in seq.blocks]
        slots = [seq.slot for seq in owners if seq.slot]
        assert len(blocks) == len(set(blocks)) == scheduler.blocks.num_used
        assert len(slots) == len(set(slots)) == scheduler.slots.num_used
        assert sum(seq.slot > 0 for seq in live) == scheduler.num_running
        assert all(scheduler.table.in_flight[seq.slot] for seq in scheduler.memory.deferred)
        assert 0 not in blocks
        assert scheduler.num_running <= scheduler.config.max_num_seqs
        table = scheduler.table
        for seq in live:
            if seq.slot:
                size = self.executor.capacity.block_size
                ahead = int(table.scheduled[seq.slot] - table.completed[seq.slot])
                assert (ahead > 0) == (table.in_flight[seq.slot] > 0)
                assert table.completed[seq.slot] <= seq.length
                assert table.pending[seq.slot] <= table.in_flight[seq.slot] <= self.engine._depth - 1
                assert len(seq.blocks) >= -(-int(table.completed[seq.slot]) // size)
                assert len(seq.blocks) <= -(-MAX_LEN // size)
                assert table.block_table[seq.slot, : len(seq.blocks)].tolist() == seq.blocks
        assert len(live) + len(self.results) == len(self.requests)

    def teardown(self):
        if not hasattr(self, "engine"):
            return
        for _ in range(6000):
            if not self.engine.has_unfinished:
                break
            self.advance()
        assert set(self.results) == set(self.requests), "a request starved"
        assert_idle(self.engine)
        for batch in self.executor.batches:
            assert batch.num_rows <= self.engine.config.max_num_batched_tokens
            assert batch.optimistic or (batch.q_starts + batch.q_lens <= MAX_LEN).all()
            assert (batch.q_starts + batch.q_lens <= self.engine.config.runtime_max_model_len).all()


EngineWalk.TestCase.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
test_random_traffic = EngineWalk.TestCase
