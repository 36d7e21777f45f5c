"""Engram: published constants and rows, hash and gate against tile_kernels bit for bit, history, images, look-up."""

from __future__ import annotations

import pytest
import torch

from deepinfer.reference import engram, quant

from .tile_kernels_oracle import tile_kernels

# model specification, appendix A
REAL_MULTIPLIERS = {
    1: [76632096046245, 4839876093313, 35959672319349, 73987337458391],
    14: [67716810739261, 51510806800915, 30921347202721, 82619226485591],
}
REAL_ENDS = {
    1: [(16000057, 16000183), (16000189, 16000321), (16000339, 16000463)],
    14: [(16000477, 16000627), (16000667, 16000769), (16000781, 16000889)],
}
REAL_ROWS = {
    1: [2490620, 30742399, 43508771, 49736205, 75400613, 94708347, 104378374, 122161697, 141932547, 152141891,
        163307126, 176705110, 195924637, 213571307, 224086977, 255415522, 264700880, 276602590, 301365869, 305879126,
        324937183, 345597303, 361149035, 375488643],
    14: [13209604, 27196187, 47300532, 55442865, 67536165, 80841902, 96369704, 120577284, 136676902, 155853486,
         162110656, 184514255, 206984010, 220009172, 236724639, 253058204, 262006302, 278444999, 300656409, 317176764,
         330486514, 337310662, 359115282, 372276798],
}  # fmt: skip
TINY_PRIMES = {
    1: [[997, 1009], [1013, 1019], [1021, 1031]],
    4: [[1033, 1039], [1049, 1051], [1061, 1063]],
}
TINY_MULTIPLIERS = {
    1: [16054181102356517, 1013938693104911, 7533437313887873, 15500112565384831],
    4: [17233254937335477, 1055401452748097, 15430165125856403, 3970983679113463],
}
TINY_ROWS = [
    ([10, 20, 30, 40], {1: [985, 1496, 2182, 3978, 4380, 5394], 4: [758, 1210, 2965, 3524, 4771, 5677]}),
    ([10, 2, 2, 2], {1: [867, 1434, 2852, 3142, 4902, 5975], 4: [1009, 1823, 2712, 3950, 5157, 5730]}),
]


@pytest.fixture(scope="module")
def real():
    return engram.derive_constants([1, 14], 16000000, 4, 8, 99092)


@pytest.fixture(scope="module")
def tiny():
    return engram.derive_constants([1, 4], 997, 4, 2, 473)


def test_real_constants_are_the_published_ones(real):
    for layer, sums in zip((1, 14), (384006168, 384016682), strict=True):
        constants = real[layer]
        assert constants.multipliers.tolist() == REAL_MULTIPLIERS[layer]
        assert [(row[0], row[-1]) for row in constants.primes.tolist()] == REAL_ENDS[layer]
        assert constants.num_rows == sums


def test_tiny_constants_are_the_published_ones(tiny):
    for layer, sums in zip((1, 4), (6090, 6296), strict=True):
        assert tiny[layer].primes.tolist() == TINY_PRIMES[layer]
        assert tiny[layer].multipliers.tolist() == TINY_MULTIPLIERS[layer]
        assert tiny[layer].num_rows == sums
        assert tiny[layer].to("cpu").offsets.tolist() == tiny[layer].offsets.tolist()


def test_rows_are_the_published_ones(real, tiny):
    for layer, expected in REAL_ROWS.items():
        assert engram.hash_rows(torch.tensor([[1000, 2000, 3000, 4000]]), real[layer])[0].tolist() == expected
    for ids, rows in TINY_ROWS:
        for layer, expected in rows.items():
            assert engram.hash_rows(torch.tensor([ids]), tiny[layer])[0].tolist() == expected


def test_hash_equals_tile_kernels(real):
    ids = torch.randint(0, 99092, (200, 4), generator=torch.Generator().manual_seed(0))
    image = torch.arange(200) % 7 == 0
    layers = list(real.values())
    primes = torch.stack([c.primes for c in layers]).int()
    expected = tile_kernels().engram_hash_ref(
        ids.int(), torch.stack([c.multipliers for c in layers]), primes, tile_kernels().make_offsets(primes), image
    )
    for constants, rows in zip(layers, expected, strict=True):
        found = engram.hash_rows(ids, constants, image)
        assert torch.equal(found, rows.long())
        assert (found[image] == engram.NO_ROW).all()
        assert (found[~image] < constants.num_rows).all()


VOCAB = torch.arange(10) + 100  # token t has compressed id t + 100


def windows(tokens, history, positions, image=None):
    """N-grams of one sequence."""
    count = len(tokens)
    return engram.ngrams(
        torch.tensor(tokens), torch.tensor([history]), torch.tensor([0]), torch.zeros(count, dtype=torch.int64),
        torch.tensor(positions), VOCAB, 2, None if image is None else torch.tensor(image),
    ).tolist()  # fmt: skip


def test_ngrams_pad_before_the_beginning():
    assert windows([7, 8, 9, 3, 4], [-1, -1, -1], range(5)) == [
        [107, 102, 102, 102], [108, 107, 102, 102], [109, 108, 107, 102], [103, 109, 108, 107], [104, 103, 109, 108],
    ]  # fmt: skip


def test_ngrams_continue_from_history():
    assert windows([5], [7, 8, 9], [3]) == [[105, 109, 108, 107]]
    assert windows([5, 6], [-1, 8, 9], [2, 3]) == [[105, 109, 108, 102], [106, 105, 109, 108]]


def test_an_unknown_token_hides_itself_and_everything_before_it():
    assert windows([7, 10, 8, 9], [-1, -1, -1], range(4)) == [
        [107, 102, 102, 102], [102, 102, 102, 102], [108, 102, 102, 102], [109, 108, 102, 102],
    ]  # fmt: skip
    assert windows([5], [7, 12, 9], [3]) == [[105, 109, 102, 102]]
    assert windows([5], [7, -3, 9], [3]) == [[105, 109, 102, 102]]


def test_an_image_token_counts_as_unknown():
    found = windows([7, 8, 9], [1, 1, 1], [3, 4, 5], image=[False, True, False])
    assert found == [[107, 101, 101, 101], [102, 102, 102, 102], [109, 102, 102, 102]]


def test_ngrams_of_several_sequences_equal_each_alone():
    """Chunked rows of three texts in one step against a walk over each text."""
    generator = torch.Generator().manual_seed(1)
    texts = [torch.randint(0, 12, (n,), generator=generator).tolist() for n in (9, 4, 13)]
    starts, counts = [5, 0, 2], [4, 1, 11]
    tokens, history, sequence, positions, expected = [], [], [], [], []
    for i, (text, start, count) in enumerate(zip(texts, starts, counts, strict=True)):
        tokens += text[start : start + count]
        history.append(([-1] * 3 + text[:start])[-3:])
        sequence += [i] * count
        positions += range(start, start + count)
        expected += [walk(text[: p + 1]) for p in range(start, start + count)]
    found = engram.ngrams(
        torch.tensor(tokens), torch.tensor(history), torch.tensor([0, 4, 5]), torch.tensor(sequence),
        torch.tensor(positions), VOCAB.int(), 2,
    )  # fmt: skip
    assert found.dtype == torch.int64
    assert found.tolist() == expected


def walk(text):
    """The rule token by token: compressed ids backwards until something is missing, then padding."""
    ids = []
    for token in reversed(text[-4:]):
        if token >= len(VOCAB):
            break
        ids.append(VOCAB[token].item())
    return ids + [102] * (4 - len(ids))


def test_fetch_reads_rows_and_zeros():
    weight = torch.randn(20, 64, generator=torch.Generator().manual_seed(0))
    values, scales = quant.quantize_rows_fp8(weight)
    rows = torch.tensor([[3, -1], [19, 3]])
    out = engram.fetch(values, scales, rows)
    dense = quant.dequantize_weight(values, scales, "fp8_row32")
    assert out.dtype == torch.bfloat16
    nothing = torch.zeros(64).bfloat16()
    assert torch.equal(out.view(2, 2, 64), torch.stack((dense[3], nothing, dense[19], dense[3])).view(2, 2, 64))
    assert torch.equal(engram.fetch(values, scales, rows, torch.float32), out.float())
    assert torch.equal(engram.fetch(values, scales, rows.new_full((2, 2), -1)), torch.zeros(2, 128).bfloat16())
    assert engram.fetch(values, scales, rows[:0]).shape == (0, 128)


def test_fetch_gives_trained_tables_their_gradient():
    table = torch.randn(6, 32).requires_grad_()
    engram.fetch(table, None, torch.tensor([[1, -1, 1, 4]]), torch.float32).sum().backward()
    assert table.grad.sum(1).tolist() == [0, 64, 0, 0, 32, 0]


def gate_inputs(rows, m=4, width=256):
    generator = torch.Generator().manual_seed(2)

    def draw(*shape):
        return torch.randn(*shape, generator=generator).bfloat16()

    return draw(rows, m, width), draw(rows, m + 1, width), draw(m, width), draw(m, width)


@pytest.mark.parametrize("rows", [1, 5, 64])
def test_inject_equals_tile_kernels(rows):
    streams, kv, q_weight, k_weight = gate_inputs(rows)
    image = torch.arange(rows) % 3 == 1
    expected = tile_kernels().engram_gate_ref(streams, kv, q_weight, k_weight, 1e-6, 1e-20, image_token_mask=image)
    weight = q_weight.float() * k_weight.float()
    out = engram.inject(streams, kv, weight, 1e-20, image)
    assert torch.equal(out, expected)
    assert torch.equal(out[image], streams[image])
    without = engram.inject(streams, kv, weight, 1e-20)
    assert torch.equal(without, tile_kernels().engram_gate_ref(streams, kv, q_weight, k_weight, 1e-6, 1e-20))


def test_inject_in_float64_does_not_show_the_number_of_rows():
    streams, kv, q_weight, k_weight = gate_inputs(33)
    weight = q_weight.float() * k_weight.float()
    whole = engram.inject(streams, kv, weight, 1e-20, None, torch.float64)
    torch.testing.assert_close(whole, engram.inject(streams, kv, weight, 1e-20), rtol=2**-7, atol=0)
    for size in (1, 2, 9, 32):
        assert torch.equal(engram.inject(streams[:size], kv[:size], weight, 1e-20, None, torch.float64), whole[:size])


def test_inject_gradients_equal_finite_differences():
    shapes = [(2, 2, 6), (2, 3, 6), (2, 6)]
    generator = torch.Generator().manual_seed(7)
    inputs = [torch.randn(s, dtype=torch.float64, generator=generator, requires_grad=True) for s in shapes]
    assert torch.autograd.gradcheck(lambda x, kv, w: engram.inject(x, kv, w, 1e-20, None, torch.float64), inputs)
