"""Hash constants that no checkpoint stores (primes and multipliers) are pinned to golden values.

They come from a seeded NumPy generator; a NumPy that draws other numbers must fail here, not in the quality of texts.
"""

from __future__ import annotations

import torch

from deepinfer.models.deepseek_v41.config import ModelConfig
from deepinfer.reference.engram import EngramConstants, derive_constants, hash_rows


def constants(config: ModelConfig) -> dict[int, EngramConstants]:
    text = config.text
    return derive_constants(
        text.engram_layer_ids,
        text.engram_vocab_size,
        text.engram_max_ngram_size,
        text.engram_n_heads,
        text.engram_compressed_vocab_size,
    )


def rows(of: EngramConstants, ids: list[int]) -> list[int]:
    return hash_rows(torch.tensor([ids]), of)[0].tolist()


def test_tiny_configuration() -> None:
    found = constants(ModelConfig.builtin("tiny"))
    assert found[1].primes.tolist() == [[997, 1009], [1013, 1019], [1021, 1031]]
    assert found[4].primes.tolist() == [[1033, 1039], [1049, 1051], [1061, 1063]]
    assert found[1].multipliers.tolist() == [16054181102356517, 1013938693104911, 7533437313887873, 15500112565384831]
    assert found[4].multipliers.tolist() == [17233254937335477, 1055401452748097, 15430165125856403, 3970983679113463]
    assert [found[layer].num_rows for layer in (1, 4)] == [6090, 6296]
    assert rows(found[1], [10, 20, 30, 40]) == [985, 1496, 2182, 3978, 4380, 5394]
    assert rows(found[4], [10, 20, 30, 40]) == [758, 1210, 2965, 3524, 4771, 5677]
    assert rows(found[1], [10, 2, 2, 2]) == [867, 1434, 2852, 3142, 4902, 5975]
    assert rows(found[4], [10, 2, 2, 2]) == [1009, 1823, 2712, 3950, 5157, 5730]


def test_published_configuration() -> None:
    found = constants(ModelConfig.builtin("full"))
    assert found[1].multipliers.tolist() == [76632096046245, 4839876093313, 35959672319349, 73987337458391]
    assert found[14].multipliers.tolist() == [67716810739261, 51510806800915, 30921347202721, 82619226485591]
    ends = [[order[0].item(), order[-1].item()] for layer in (1, 14) for order in found[layer].primes]
    assert ends == [
        [16000057, 16000183],
        [16000189, 16000321],
        [16000339, 16000463],
        [16000477, 16000627],
        [16000667, 16000769],
        [16000781, 16000889],
    ]
    first = rows(found[1], [1000, 2000, 3000, 4000])
    assert first[:4] + first[-2:] == [2490620, 30742399, 43508771, 49736205, 361149035, 375488643]
    second = rows(found[14], [1000, 2000, 3000, 4000])
    assert second[:4] + second[-2:] == [13209604, 27196187, 47300532, 55442865, 359115282, 372276798]


def test_products_stay_below_the_sign_bit() -> None:
    for name in ("tiny", "full"):
        config = ModelConfig.builtin(name)
        largest = config.text.engram_compressed_vocab_size - 1
        for layer in constants(config).values():
            assert all(multiplier * largest < 2**63 for multiplier in layer.multipliers.tolist())
            assert all(multiplier % 2 for multiplier in layer.multipliers.tolist())
