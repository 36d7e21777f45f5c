"""The prefix cache of the engine over the stub, which knows what every copied slot and every shared block must hold."""

from __future__ import annotations

import numpy as np
import pytest
from stub_executor import IMAGE, IN_ORDER, PLAIN, StubExecutor, assert_idle, expected_tokens, make_engine, run_all

from deepinfer.engine.blocks import BlockPool
from deepinfer.engine.prefix import PrefixCache
from deepinfer.errors import EngineError
from deepinfer.sampling_params import SamplingParams

RNG = np.random.default_rng(8)
SNAPSHOTS = 12


def prompt_of(length: int) -> list[int]:
    return RNG.integers(6, 90, length).tolist()


def params(max_tokens: int = 4, **others) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True, **others)


def cached_engine(num_blocks: int = 65, snapshots: int = SNAPSHOTS, **arguments):
    arguments = {"prefix_snapshot_interval": 16, "max_num_batched_tokens": 512} | arguments
    executor = StubExecutor(num_blocks=num_blocks, num_snapshots=snapshots)
    return make_engine(executor, enable_prefix_caching=True, **arguments)


def serve(engine, prompt: list[int], wanted: SamplingParams | None = None):
    """The result of one request served alone, checked."""
    wanted = params() if wanted is None else wanted
    name = engine.add_request(token_ids=prompt, params=wanted)
    result = run_all(engine)[name]
    assert result.token_ids == expected_tokens(prompt, wanted)[0]
    assert_idle(engine)
    engine.scheduler.prefix.cache.check(engine._executor.capacity.num_snapshots)
    return result


def hit(engine, prompt: list[int], wanted: SamplingParams | None = None) -> int:
    return serve(engine, prompt, wanted).metrics.num_cached_tokens


def test_the_same_prompt_again_computes_its_last_block_only():
    engine, prompt = cached_engine(), prompt_of(50)
    assert [hit(engine, prompt) for _ in range(3)] == [0, 48, 48]
    assert engine.stats.cached_tokens == 96
    assert "96 more from the prefix cache" in engine.stats.line()


@pytest.mark.parametrize(("length", "expected"), [(7, 0), (8, 0), (9, 8), (16, 8), (17, 16)])
def test_at_least_one_row_is_computed(length, expected):
    engine, prompt = cached_engine(), prompt_of(length)
    hit(engine, prompt)
    assert hit(engine, prompt) == expected


def test_a_longer_text_goes_on_from_the_end_of_the_shorter_one():
    engine, prompt = cached_engine(), prompt_of(40)
    hit(engine, prompt)
    assert hit(engine, prompt + prompt_of(11)) == 40


def test_texts_that_part_go_on_from_the_nearest_snapshot_and_leave_one_where_they_part():
    engine, prompt = cached_engine(prefix_snapshot_interval=512), prompt_of(60)
    hit(engine, prompt)
    others = [prompt[:45] + prompt_of(15) for _ in range(3)]
    assert [hit(engine, other) for other in others] == [0, 40, 40]
    engine = cached_engine(snapshots=32, prefix_snapshot_interval=16)
    hit(engine, prompt)
    assert hit(engine, prompt[:45] + prompt_of(15)) == 32


def test_the_next_turn_goes_on_from_the_output():
    engine, prompt = cached_engine(), [7] * 20
    first = serve(engine, prompt, params(40))
    assert IMAGE not in first.token_ids
    known = len(prompt) + len(first) - 1  # the last token was never fed
    assert hit(engine, prompt + first.token_ids + prompt_of(5)) == known // 8 * 8


def test_one_snapshot_follows_a_text_that_is_being_written():
    engine = cached_engine()
    serve(engine, prompt_of(4), params(100))
    assert engine.scheduler.prefix.cache.num_snapshots == 1


def test_requests_that_arrive_together_share():
    engine, start = cached_engine(), prompt_of(80)
    prompts = [start + prompt_of(5) for _ in range(6)]
    for prompt in prompts:
        engine.add_request(token_ids=prompt, params=params(10))
    results = run_all(engine)
    assert [results[str(i)].token_ids for i in range(6)] == [expected_tokens(p, params(10))[0] for p in prompts]
    hits = [results[str(i)].metrics.num_cached_tokens for i in range(6)]
    assert hits == [0, 80, 80, 80, 80, 80]
    assert_idle(engine)


def test_shared_blocks_are_held_once():
    engine, prompt = cached_engine(), prompt_of(64)
    hit(engine, prompt)
    for _ in range(4):
        engine.add_request(token_ids=prompt + prompt_of(3), params=params(30))
    while engine.scheduler.num_waiting or len(engine.scheduler._running) < 4:
        engine.step()
    shared = [seq.blocks[:8] for seq in engine.scheduler._running.values()]
    assert all(blocks == shared[0] for blocks in shared)
    assert engine.scheduler.blocks.references(shared[0][0]) == 4
    run_all(engine)
    assert_idle(engine)


def test_cached_blocks_are_free_memory_and_the_oldest_goes_first():
    engine = cached_engine(num_blocks=21)  # 20 blocks of 8 tokens
    first, second = prompt_of(60), prompt_of(60)
    assert [hit(engine, first), hit(engine, second)] == [0, 0]
    assert hit(engine, prompt_of(100)) == 0  # needs 13 of the 20
    assert hit(engine, second) > 0 or hit(engine, first) == 0
    assert engine.scheduler.blocks.num_free == 20


def test_snapshots_are_reused_in_order_of_use():
    engine = cached_engine(snapshots=2, prefix_snapshot_interval=512)
    a, b, c = prompt_of(20), prompt_of(20), prompt_of(20)
    assert [hit(engine, x) for x in (a, b, a, c, a, b)] == [0, 0, 16, 0, 16, 0]


@PLAIN
def test_a_preempted_request_goes_on_from_its_own_blocks():
    engine = cached_engine(num_blocks=22, max_num_seqs=4)
    prompts = [prompt_of(length) for length in (30, 30, 30, 30)]
    for prompt in prompts:
        engine.add_request(token_ids=prompt, params=params(40))
    results = run_all(engine)
    for number, prompt in enumerate(prompts):
        assert results[str(number)].token_ids == expected_tokens(prompt, params(40))[0]
    assert engine.stats.preemptions > 0
    assert engine.stats.cached_tokens > 0
    assert {result.metrics.num_cached_tokens for result in results.values()} == {0}
    assert_idle(engine)


def test_scored_prompts_compute_every_row():
    engine, prompt = cached_engine(), prompt_of(50)
    hit(engine, prompt)
    result = serve(engine, prompt, params(prompt_logprobs=True))
    assert result.metrics.num_cached_tokens == 0
    assert None not in result.prompt_logprobs[1:]
    assert hit(engine, prompt) == 48  # but they serve others


@PLAIN
def test_an_aborted_request_leaves_what_it_has_computed_and_nothing_else():
    engine, prompt = cached_engine(), prompt_of(30)
    name = engine.add_request(token_ids=prompt, params=params(100))
    for _ in range(20):
        engine.step()
    engine.abort_request(name)
    (output,) = engine.take_outputs()
    text = prompt + output.token_ids
    cache = engine.scheduler.prefix.cache
    assert cache.num_blocks <= len(text) // 8
    assert hit(engine, text + prompt_of(9)) in {len(text) // 8 * 8, len(text) // 8 * 8 - 8}


def test_a_request_without_numbers_is_trusted_by_nobody():
    bad = prompt_of(20)
    executor = StubExecutor(num_snapshots=SNAPSHOTS, refuse=lambda seen: "not finite" if seen == bad else None)
    engine = make_engine(executor, enable_prefix_caching=True)
    for _ in range(2):
        name = engine.add_request(token_ids=bad, params=params())
        result = run_all(engine)[name]
        assert result.finish_reason == "error"
        assert result.metrics.num_cached_tokens == 0
    assert engine.scheduler.prefix.cache.num_blocks == engine.scheduler.prefix.cache.num_snapshots == 0


def test_a_broken_step_clears_the_cache():
    engine, prompt = cached_engine(), prompt_of(30)
    hit(engine, prompt)
    engine._executor.fail_at = {len(engine._executor.batches) + 1}
    engine.add_request(token_ids=prompt, params=params())
    with pytest.raises(EngineError):
        run_all(engine)
    engine.take_outputs()
    assert hit(engine, prompt) == 0
    assert hit(engine, prompt) == 24


@IN_ORDER
def test_truncated_prompts_compute_what_is_kept():
    engine = cached_engine(yoco_prefill_truncation_mode="compact", yoco_prefill_keep_tokens=140, max_model_len=1024)
    prompt = prompt_of(300)
    hit(engine, prompt)
    assert hit(engine, prompt) == 160
    assert hit(engine, prompt + prompt_of(150)) == 304 - 8
    assert hit(engine, prompt_of(139)) == 0


def test_off_by_default_and_without_room_for_snapshots():
    engine, prompt = make_engine(StubExecutor(num_snapshots=4)), prompt_of(50)
    assert engine.scheduler.prefix is None
    engine.add_request(token_ids=prompt, params=params())
    run_all(engine)
    assert make_engine(enable_prefix_caching=True).scheduler.prefix is None


# --- the cache by itself ---


def test_a_hash_depends_on_every_token_before_it_and_on_the_salt():
    def hashes(tokens, salt="a"):
        found = []
        PrefixCache(BlockPool(4), 4, [], salt).extend(found, np.array(tokens), len(tokens))
        return found

    text = list(range(12))
    assert len(hashes(text)) == 3
    assert hashes(text[:11]) == hashes(text)[:2]
    changed = hashes([99, *text[1:]])
    assert all(a != b for a, b in zip(hashes(text), changed, strict=True))
    assert hashes(text, "b")[0] != hashes(text)[0]
    assert all(len(digest) == 16 for digest in hashes(text))


def test_a_copy_that_turns_out_useless_is_given_back():
    pool = BlockPool(4)
    cache = PrefixCache(pool, 4, [7], "")
    hashes: list[bytes] = []
    cache.extend(hashes, list(range(8)), 8)
    blocks = pool.allocate(2)
    slot = cache.reserve()
    assert (slot, cache.reserve()) == (7, 0)
    assert cache.confirm(slot, hashes[0], 4) is None, "nobody knows the block"
    cache.publish(hashes, blocks, 0, 1)
    assert cache.confirm(cache.reserve(), hashes[0], 4) is not None
    assert cache.match(hashes, 8).end == 4
    pool.free(blocks)
    assert pool.allocate(3)  # takes the kept block, too
    assert cache.match(hashes, 8).end == 0
    cache.check(1)
