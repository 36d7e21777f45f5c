"""Cache memory: published byte layouts, rings, paged blocks, pair compression across steps."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from deepinfer.hooks.types import CacheSpec, RingRows
from deepinfer.reference import cache, quant

SPEC = CacheSpec(
    block_size=16, ring=6, window_layers=2, head_dim=512, index_head_dim=128, compressed={1: 2, 3: 1},
    index={1: 2, 3: 1}, state={1: 7}, compressed_format="fp4",
)  # fmt: skip


def storage(packed=True, quantize=True, spec=SPEC):
    return cache.Storage(spec, 4, 3, packed, quantize, torch.device("cpu"))


def test_sizes_are_the_published_bytes():
    made = storage()
    block = sum(table.bytes.nbytes for table in (*made.entries.values(), *made.index.values())) / 4
    slot = (sum(table.bytes.nbytes for table in made.windows) + made.state[1].nbytes) / 3
    assert block == SPEC.bytes_per_block() == 8 * 288 + 16 * 288 + 8 * 68 + 16 * 68
    assert slot == SPEC.bytes_per_slot() == 2 * 6 * 528 + 7 * 2 * 512 * 4


def test_window_row_is_codes_then_scales():
    torch.manual_seed(0)
    made, keys = storage(), torch.randn(4, 512).bfloat16()
    ring = RingRows(torch.tensor([1, 3]), torch.tensor([6 + 2, 6 + 3]))
    rounded = made.store_window(1, keys, ring)
    codes, scales = quant.encode_q8(keys)
    assert torch.equal(made.windows[1].bytes[8], torch.cat((codes[1], scales[1])))
    assert torch.equal(rounded, quant.decode_q8(codes, scales, torch.bfloat16))
    loaded = made.load_window(1, torch.tensor([[1]]), torch.tensor([[-1, 8, 9]]))
    assert torch.equal(loaded[0, 0], torch.zeros(512).bfloat16())
    assert torch.equal(loaded[0, 1:], rounded[[1, 3]])


def test_index_block_holds_all_data_then_all_scales():
    torch.manual_seed(1)
    made, keys = storage(), torch.randn(3, 128).bfloat16()
    made.store_index(1, keys, torch.tensor([8, 9, 17]))  # blocks of 8 entries: block 1 offsets 0, 1; block 2 offset 1
    codes, scales = quant.encode_q4u(keys)
    block = made.index[1].bytes[1]
    assert torch.equal(block[:128], torch.cat((codes[0], codes[1])))
    assert torch.equal(block[8 * 64 : 8 * 64 + 8], torch.cat((scales[0], scales[1])))
    loaded = made.load_index(1, torch.tensor([[2, 1]]))
    decoded = quant.decode_q4u(codes, scales, torch.bfloat16)
    assert torch.equal(loaded[0, [1, 8, 9]], decoded[[2, 0, 1]])
    assert loaded.shape == (1, 16, 128)


@pytest.mark.parametrize("format", ["fp4", "fp8"])
def test_entries_come_back_rounded_and_requantizing_is_lossless(format):
    torch.manual_seed(2)
    spec = CacheSpec(16, 6, 2, 512, 128, {1: 2}, {1: 2}, {1: 7}, format)
    made, entries = storage(spec=spec), (torch.randn(5, 512) * 3).bfloat16()
    made.store_entries(1, entries, torch.arange(10, 15))
    once = made.load_entries(1, torch.arange(10, 15))
    assert (once - entries).abs().max() < 1.5
    made.store_entries(1, once, torch.arange(10, 15))
    if format == "fp8":
        assert torch.equal(made.load_entries(1, torch.arange(10, 15)), once)


@pytest.mark.parametrize("what", ["window", "entries", "index"])
def test_plain_values_equal_packed_bytes(what):
    torch.manual_seed(3)
    packed, plain, smooth = storage(), storage(packed=False), storage(packed=False, quantize=False)
    x = torch.randn(4, 512 if what != "index" else 128).bfloat16()
    rows, ring = torch.arange(4), RingRows(torch.arange(4), torch.arange(4))
    results = []
    for made in (packed, plain, smooth):
        if what == "window":
            stored = made.store_window(0, x, ring)
            results.append(made.load_window(0, torch.tensor([[0]]), rows.unsqueeze(0))[0].float())
            assert torch.equal(stored.float(), results[-1])
        elif what == "entries":
            made.store_entries(3, x, rows)
            results.append(made.load_entries(3, rows).float())
        else:
            made.store_index(3, x, rows)
            results.append(made.load_index(3, torch.tensor([[0]]))[0, :4].float())
    assert torch.equal(results[0], results[1])
    assert torch.equal(results[2], x.float())
    assert not torch.equal(results[0], results[2])


def test_merge_takes_the_left_token_from_the_step_or_from_the_state():
    torch.manual_seed(4)
    scores, latents = torch.randn(5, 8), torch.randn(5, 8)
    state = torch.zeros(3, 4, 2, 8)

    def step(first, last):
        count = last - first
        positions = torch.arange(first, last)
        return SimpleNamespace(
            sequence=torch.zeros(count, dtype=torch.int64), positions=positions, q_starts=torch.tensor([first]),
            slots=torch.tensor([2]),
        )  # fmt: skip

    def ring(first, last):
        return RingRows(torch.arange(last - first), 2 * 4 + torch.arange(first, last) % 4)

    whole = cache.merge_pairs(scores[:4], latents[:4], state, torch.tensor([1, 3]), step(0, 4), torch.float32)
    weight = torch.softmax(torch.stack((scores[0], scores[1])), 0)
    torch.testing.assert_close(whole[0], weight[0] * latents[0] + weight[1] * latents[1])
    cache.keep_state(scores[:3], latents[:3], state, ring(0, 3))
    split = cache.merge_pairs(scores[3:4], latents[3:4], state, torch.tensor([0]), step(3, 4), torch.float32)
    assert torch.equal(split[0], whole[1])


def test_clone_and_zero_move_whole_blocks_and_slots():
    torch.manual_seed(5)
    made = storage()
    for table in (*made.windows, *made.entries.values(), *made.index.values()):
        table.bytes.random_(0, 255)
    made.state[1].normal_()
    before = made.load_index(3, torch.tensor([[1]])).clone(), made.load_entries(1, torch.arange(8, 16)).clone()
    made.clone_blocks(torch.tensor([1]), torch.tensor([3]))
    assert torch.equal(made.load_index(3, torch.tensor([[3]])).nan_to_num(), before[0].nan_to_num())
    assert torch.equal(made.load_entries(1, torch.arange(24, 32)).nan_to_num(), before[1].nan_to_num())
    made.clone_slots(torch.tensor([1]), torch.tensor([2]))
    assert torch.equal(made.state[1][2], made.state[1][1])
    made.fill_slots(torch.tensor([2]), 0)
    assert made.windows[1].bytes[12:].abs().sum() == 0 and made.windows[1].bytes[6:12].abs().sum() > 0
    assert made.state[1][2].abs().sum() == 0 and made.state[1][1].abs().sum() > 0
