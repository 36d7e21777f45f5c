"""Checks of the oracle that need no product: published vectors, casts, and properties that hold for any weights."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from tokenizers import Regex, Tokenizer, normalizers

from deepinfer.models.deepseek_v41.config import ModelConfig
from deepinfer.testing.checkpoint import write_checkpoint

from .oracle import Oracle, largest
from .oracle_checkpoint import EngramConstants, compressed_vocabulary
from .oracle_numbers import (
    base_inv_freq,
    decode_e2m1_pairs,
    decode_e4m3,
    e2m1_table,
    e4m3_table,
    power_of_two_above,
    quantize_q4e,
    quantize_q4u,
    quantize_q8,
    round_bf16,
    round_to_table,
    yarn_inv_freq,
)

FREQUENCY_CHANNELS = [0, 10, 15, 16, 20, 24, 25, 31]


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("oracle")
    return {name: write_checkpoint(ModelConfig.builtin(name), root / name, seed=3) for name in ("tiny", "micro")}


@pytest.fixture(scope="module")
def micro(checkpoints: dict[str, Path]) -> Oracle:
    return Oracle(checkpoints["micro"])


@pytest.fixture(scope="module")
def text() -> list[int]:
    return np.random.default_rng(7).integers(0, 512, 110).tolist()


# Numbers


def test_bf16_rounding_equals_torch() -> None:
    x = torch.randn(20000, dtype=torch.float32, generator=torch.Generator().manual_seed(0)) * 3
    halfway = torch.tensor([1 + 2**-8, 1 + 3 * 2**-8, -(1 + 2**-8), 0.0], dtype=torch.float32)
    x = torch.cat([x, halfway])
    assert np.array_equal(round_bf16(x.double().numpy()), x.bfloat16().double().numpy())


def test_e4m3_codes_and_rounding_equal_torch() -> None:
    codes = np.arange(256, dtype=np.uint8)
    expected = torch.from_numpy(codes).view(torch.float8_e4m3fn).double().numpy()
    assert np.array_equal(decode_e4m3(codes), expected, equal_nan=True)
    table = e4m3_table()
    middles = (table[:-1] + table[1:]) / 2
    x = np.concatenate([np.random.default_rng(1).uniform(-448, 448, 20000), middles, -middles])
    x = np.concatenate([x, x * 2.0**-10])
    x32 = torch.from_numpy(x).float()
    expected = x32.to(torch.float8_e4m3fn).double().numpy()
    assert np.array_equal(round_to_table(x32.double().numpy(), table), expected)


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (0.25, 0),
        (0.75, 1),
        (1.25, 1),
        (1.75, 2),
        (2.5, 2),
        (3.5, 4),
        (5, 4),
        (5.01, 6),
        (99, 6),
        (-0.75, -1),
        (0.26, 0.5),
    ],
)
def test_e2m1_ties_go_to_the_even_code(value: float, expected: float) -> None:
    assert round_to_table(np.array([value]), e2m1_table())[0] == expected


def test_packed_e2m1_holds_the_even_channel_in_the_low_nibble() -> None:
    packed = np.array([[0x72, 0xF9]], dtype=np.uint8)
    assert decode_e2m1_pairs(packed).tolist() == [[1.0, 6.0, -0.5, -6.0]]


def test_power_of_two_above_equals_the_bit_formula() -> None:
    t = np.abs(np.random.default_rng(2).standard_normal(5000)).astype(np.float32)
    t = np.concatenate([t, np.float32([1, 2, 0.5, 2**-20, 2**-126, np.nextafter(np.float32(1), np.float32(2))])])
    expected = ((t.view(np.uint32) + 0x7FFFFF) & 0x7F800000).view(np.float32)
    assert np.array_equal(power_of_two_above(t.astype(np.float64)), expected)


def test_q8_scale_is_the_least_power_of_two_that_fits() -> None:
    x = round_bf16(np.random.default_rng(3).standard_normal((50, 64)))
    for group, quantized in zip(x.reshape(-1, 32), quantize_q8(x).reshape(-1, 32), strict=True):
        scale = min(2.0**e for e in range(-40, 40) if np.abs(group).max() / 448 <= 2.0**e)
        expected = torch.from_numpy(group / scale).float().to(torch.float8_e4m3fn).double().numpy() * scale
        assert np.array_equal(quantized, expected)


def test_quantizers_floor_the_scale_of_small_groups() -> None:
    tiny = np.full((1, 32), 1e-10)
    assert np.array_equal(quantize_q8(tiny), np.zeros((1, 32)))  # scale 2^-22, so the least code is 2^-31 = 4.7e-10
    assert np.array_equal(quantize_q8(np.zeros((1, 32))), np.zeros((1, 32)))
    assert np.array_equal(quantize_q4e(np.full((1, 16), 2.0**-12)), np.zeros((1, 16)))  # below half of 0.5 * 2^-9
    assert quantize_q4u(np.full((1, 32), 2.0**-100)).max() == 2.0**-100  # its floor is next to nothing


def test_q4e_rounds_its_scale_to_e4m3_and_multiplies_by_the_reciprocal() -> None:
    x = np.zeros((1, 16))
    x[0, 0], x[0, 1] = 7.0, 2.9
    scale = 1.125  # 7/6 = 1.1667 lies between the e4m3 values 1.125 and 1.25
    assert quantize_q4e(x)[0, :2].tolist() == [6 * scale, 3 * scale]
    assert not np.array_equal(quantize_q4e(x), quantize_q4u(np.tile(x, 2))[:, :16])


# Published vectors

REAL_ROWS = {
    1: """2490620 30742399 43508771 49736205 75400613 94708347 104378374 122161697
          141932547 152141891 163307126 176705110 195924637 213571307 224086977 255415522
          264700880 276602590 301365869 305879126 324937183 345597303 361149035 375488643""",
    14: """13209604 27196187 47300532 55442865 67536165 80841902 96369704 120577284
          136676902 155853486 162110656 184514255 206984010 220009172 236724639 253058204
          262006302 278444999 300656409 317176764 330486514 337310662 359115282 372276798""",
}


@pytest.fixture(scope="module")
def real_engram() -> EngramConstants:
    text = ModelConfig.builtin("full").raw["text_config"]
    return EngramConstants(
        text["engram_layer_ids"],
        text["engram_max_ngram_size"],
        text["engram_n_heads"],
        text["engram_vocab_size"],
        text["engram_compressed_vocab_size"],
    )


def test_engram_constants_of_the_real_config(real_engram: EngramConstants) -> None:
    assert real_engram.bound == 46539438283891
    assert real_engram.multipliers[1].tolist() == [76632096046245, 4839876093313, 35959672319349, 73987337458391]
    assert real_engram.multipliers[14].tolist() == [67716810739261, 51510806800915, 30921347202721, 82619226485591]
    ends = [(order[0], order[-1]) for layer in (1, 14) for order in real_engram.primes[layer]]
    assert ends == [
        (16000057, 16000183),
        (16000189, 16000321),
        (16000339, 16000463),
        (16000477, 16000627),
        (16000667, 16000769),
        (16000781, 16000889),
    ]
    sums = [sum(prime for order in real_engram.primes[layer] for prime in order) for layer in (1, 14)]
    assert sums == ModelConfig.builtin("full").raw["text_config"]["engram_num_embeddings"]


@pytest.mark.parametrize("layer", [1, 14])
def test_engram_rows_of_the_real_config(real_engram: EngramConstants, layer: int) -> None:
    assert real_engram.rows(layer, [1000, 2000, 3000, 4000]) == [int(row) for row in REAL_ROWS[layer].split()]


def test_engram_of_the_tiny_config() -> None:
    engram = EngramConstants([1, 4], 4, 2, 997, 473)
    assert engram.primes == {
        1: [[997, 1009], [1013, 1019], [1021, 1031]],
        4: [[1033, 1039], [1049, 1051], [1061, 1063]],
    }
    assert engram.multipliers[1].tolist() == [
        16054181102356517,
        1013938693104911,
        7533437313887873,
        15500112565384831,
    ]
    assert engram.rows(1, [10, 20, 30, 40]) == [985, 1496, 2182, 3978, 4380, 5394]
    assert engram.rows(4, [10, 20, 30, 40]) == [758, 1210, 2965, 3524, 4771, 5677]
    assert engram.rows(1, [10, 2, 2, 2]) == [867, 1434, 2852, 3142, 4902, 5975]
    assert engram.rows(4, [10, 2, 2, 2]) == [1009, 1823, 2712, 3950, 5157, 5730]


@pytest.mark.parametrize(
    ("table", "expected"),
    [
        (
            base_inv_freq(10000),
            [1, 5.623413e-02, 1.333521e-02, 1.0e-02, 3.162278e-03, 1.0e-03, 7.498942e-04, 1.333522e-04],
        ),
        (
            yarn_inv_freq(160000, 16, 32, 1, 65536),
            [1, 2.364354e-02, 3.635539e-03, 2.265625e-03, 2.969778e-04, 1.953125e-05, 5.372312e-06, 5.680529e-07],
        ),
        (
            yarn_inv_freq(160000, 16, 32, 1, 256),
            [1, 1.477721e-03, 2.272212e-04, 1.5625e-04, 3.493856e-05, 7.8125e-06, 5.372312e-06, 5.680529e-07],
        ),
    ],
    ids=["base", "yarn-real", "yarn-tiny"],
)
def test_inv_freq(table: np.ndarray, expected: list[float]) -> None:
    np.testing.assert_allclose(table[FREQUENCY_CHANNELS], expected, rtol=6e-7)  # published from float32


def test_compressed_vocabulary_of_the_tiny_tokenizer(checkpoints: dict[str, Path]) -> None:
    path = checkpoints["tiny"] / "tokenizer.json"
    ours = compressed_vocabulary(path)
    assert (len(ours), ours.max() + 1, ours[2]) == (512, 473, 2)
    assert ours.tolist() == _compressed_by_tokenizers(path)


def _compressed_by_tokenizers(path: Path) -> list[int]:
    """The same rules through the normalizers of the `tokenizers` package."""
    lone = "\ue000"
    pipeline = normalizers.Sequence(
        [
            normalizers.NFKC(),
            normalizers.NFD(),
            normalizers.StripAccents(),
            normalizers.Lowercase(),
            normalizers.Replace(Regex(r"[ \t\r\n]+"), " "),
            normalizers.Replace(Regex(r"^ $"), lone),
            normalizers.Strip(),
            normalizers.Replace(lone, " "),
        ]
    )
    tokenizer, classes = Tokenizer.from_file(str(path)), {}
    ids = []
    for token in range(tokenizer.get_vocab_size()):
        text = tokenizer.decode([token], skip_special_tokens=False)
        key = tokenizer.id_to_token(token) if "\ufffd" in text else pipeline.normalize_str(text) or text
        ids.append(classes.setdefault(key, len(classes)))
    return ids


# Properties of the forward


def test_equal_scores_prefer_the_lower_index() -> None:
    assert largest(np.array([1.0, 3, 2, 3, 3, 2]), 2).tolist() == [1, 3]
    assert largest(np.array([1.0, 3, 2, 3, 3, 2]), 4).tolist() == [1, 2, 3, 4]
    assert largest(np.array([]), 4).tolist() == []


def test_one_token_has_no_ratio_two_entry(micro: Oracle) -> None:
    logits = micro.logits([17])
    assert torch.isfinite(logits).all()
    assert micro.intermediate("layers.2.selected")[0].tolist() == []
    assert micro.intermediate("layers.5.selected")[0].tolist() == [0]


def test_logits_of_a_text_begin_with_those_of_its_beginning(micro: Oracle, text: list[int]) -> None:
    whole = micro.logits(text)
    for length in (1, 2, 9, 63, 80):
        assert (whole[:length] - micro.logits(text[:length])).abs().max() < 1e-9


def test_a_later_token_changes_no_earlier_logits(micro: Oracle, text: list[int]) -> None:
    changed = [*text]
    changed[70] = (changed[70] + 1) % 512
    before, after = micro.logits(text), micro.logits(changed)
    assert (before[:70] - after[:70]).abs().max() < 1e-9
    assert (before[70:] - after[70:]).abs().amax(1).min() > 1e-9  # every later row has it in reach


def test_exact_mode_has_the_prefix_property_on_short_texts(checkpoints: dict[str, Path], text: list[int]) -> None:
    oracle = Oracle(checkpoints["tiny"], mode="exact")
    whole = oracle.logits(text[:8])
    for length in (1, 3, 7):
        assert torch.equal(whole[:length], oracle.logits(text[:length]))


def test_exact_mode_differs_from_smooth_by_quantization_noise(checkpoints: dict[str, Path], text: list[int]) -> None:
    smooth = Oracle(checkpoints["tiny"]).logits(text)
    exact = Oracle(checkpoints["tiny"], mode="exact").logits(text)
    noise = (smooth - exact).pow(2).mean().sqrt() / smooth.std()
    assert 0.01 < noise < 0.4


def test_window_top_k_and_candidates_limit_what_a_row_reads(micro: Oracle, text: list[int]) -> None:
    micro.logits(text)
    for layer, ratio in ((2, 2), (4, 2), (5, 1), (6, 1)):
        scores = micro.intermediate(f"layers.{layer}.index_scores")
        for p, entries in micro.intermediate(f"layers.{layer}.selected").items():
            assert len(scores[p]) == (p + 1) // ratio
            assert len(entries) == min(8, (p + 1) // ratio)
            assert list(entries) == sorted(set(entries))
            if layer != 6 and len(entries):
                assert scores[p][entries].min() >= np.delete(scores[p], entries).max(initial=-np.inf)


def test_candidate_blocks_prune_the_later_index_source(micro: Oracle, text: list[int]) -> None:
    micro.logits(text)
    scores = micro.intermediate("layers.6.index_scores")
    pruned = 0
    for p, blocks in micro.intermediate("candidates").items():
        assert len(blocks) == min(8, p // 8 + 1)
        assert p // 8 in blocks
        entries = micro.intermediate("layers.6.selected")[p]
        assert set(entries // 8) <= set(blocks)
        pruned += entries.tolist() != largest(scores[p], 8).tolist()
        assert p >= 64 or entries.tolist() == largest(scores[p], 8).tolist()
    assert pruned > 0


@pytest.mark.parametrize("keep", [1, 5, 20, 109])
def test_compact_equals_mask_on_the_kept_rows(micro: Oracle, text: list[int], keep: int) -> None:
    mask, compact = micro.logits(text, "mask", keep), micro.logits(text, "compact", keep)
    assert torch.isnan(compact[:-keep]).all()
    assert (mask[-keep:] - compact[-keep:]).abs().max() < 1e-9


def test_keeping_everything_equals_no_truncation(micro: Oracle, text: list[int]) -> None:
    off = micro.logits(text)
    for mode in ("mask", "compact"):
        assert torch.equal(micro.logits(text, mode, len(text)), off)
        assert torch.equal(micro.logits(text, mode, 4 * len(text)), off)


def test_truncation_changes_the_first_kept_rows(micro: Oracle, text: list[int]) -> None:
    assert (micro.logits(text, "mask", 20)[-20] - micro.logits(text)[-20]).abs().max() > 1e-3


def test_masked_rows_before_the_kept_range_read_compressed_entries_only(micro: Oracle, text: list[int]) -> None:
    """Their values are finite and feed nothing: kept rows do not see them in any decoder layer."""
    changed = [*text]
    changed[3] += 1
    logits = micro.logits(text, "mask", 20)
    assert torch.isfinite(logits).all()
    assert (logits[:3] - micro.logits(changed, "mask", 20)[:3]).abs().max() < 1e-9


# Draft head


def test_draft_from_truncated_texts_is_the_same_from_either_mode(micro: Oracle, text: list[int]) -> None:
    mask = micro.draft(text, golden=5, block=5, truncation="mask", keep=20)
    compact = micro.draft(text, golden=5, block=5, truncation="compact", keep=20)
    for one, other in zip(mask, compact, strict=True):
        assert torch.isfinite(one).all()
        assert (one - other).abs().max() < 1e-9


def test_every_draft_row_sees_the_whole_block_and_the_golden_token(micro: Oracle, text: list[int]) -> None:
    _, hidden = micro.draft(text, golden=5, block=5)
    _, other = micro.draft(text, golden=6, block=5)
    _, shorter = micro.draft(text, golden=5, block=4)
    assert ((hidden - other).abs().amax(1) > 1e-6).all()
    assert ((hidden[:4] - shorter).abs().amax(1) > 1e-6).all()  # row 0 too: the block is bidirectional


def test_draft_chain_is_sequential_and_greedy(micro: Oracle, text: list[int]) -> None:
    base, hidden = micro.draft(text, golden=5, block=5)
    chain = micro.draft_chain(base, hidden, golden=5)
    assert chain.tokens == [int(row.argmax()) for row in chain.logits]
    embed, out = (micro.weights[f"mtp.1.markov_head.{name}.weight"] for name in ("embed", "head"))
    for i, previous in enumerate([5, *chain.tokens[:-1]]):
        np.testing.assert_allclose(chain.logits[i] - base[i].numpy(), out @ embed[previous], atol=1e-12)
    assert ((chain.confidences > 0) & (chain.confidences < 1)).all()
    calm = micro.draft_chain(base, hidden, golden=5, temperature=1e9)
    np.testing.assert_allclose(calm.confidences, 0.5, atol=1e-6)
