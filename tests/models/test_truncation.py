"""Prefill truncation: mask and compact agree, short prompts are untouched, and the cut depends on the whole prompt."""

from __future__ import annotations

import random

import pytest
import torch

from deepinfer.errors import ConfigError
from deepinfer.testing import forward_logits
from deepinfer.testing.logits import Harness

KEEP = 20
"""tokens the micro model keeps: at least its window of 8 plus 6 of backtracking"""


def text(length):
    generator = random.Random(length)
    return [0] + [generator.randrange(3, 500) for _ in range(length - 1)]


@pytest.fixture(scope="module")
def micro(checkpoints):
    return checkpoints("micro")


@pytest.mark.parametrize("length", [1, 19, 20, 21, 33, 90])
def test_mask_equals_compact_on_kept_rows(micro, length):
    ids = text(length)
    mask = forward_logits(micro, ids, "smooth", "mask", KEEP)
    compact = forward_logits(micro, ids, "smooth", "compact", KEEP)
    dropped = torch.isnan(compact).all(1)
    assert dropped.sum() == max(0, length - KEEP)
    assert not dropped[-KEEP:].any() and torch.isfinite(mask).all()
    torch.testing.assert_close(mask[~dropped], compact[~dropped], rtol=0, atol=1e-5)


@pytest.mark.parametrize("mode", ["mask", "compact"])
def test_prompts_within_keep_are_untouched_and_longer_ones_are_not(micro, mode):
    ids = text(60)
    off = forward_logits(micro, ids, "smooth")
    torch.testing.assert_close(forward_logits(micro, ids, "smooth", mode, 60), off, rtol=0, atol=1e-5)
    cut = forward_logits(micro, ids, "smooth", mode, KEEP)
    assert (cut[-KEEP] - off[-KEEP]).abs().max() > 1e-3


@pytest.mark.parametrize("mode", ["mask", "compact"])
@pytest.mark.parametrize("cuts", [[1], [40], [69, 70, 71], [10, 20, 30, 40, 50, 60, 70, 80], [88, 89]])
def test_chunked_truncation_equals_one_shot(micro, mode, cuts):
    ids = text(90)
    whole = forward_logits(micro, ids, "smooth", mode, KEEP)
    harness = Harness(micro, "smooth", mode, KEEP)
    parts = []
    for start, end in zip([0, *cuts], [*cuts, len(ids)], strict=True):
        with torch.inference_mode():
            parts.append(harness.logits(harness.inputs([(0, ids, start, end)])))
    torch.testing.assert_close(torch.cat(parts)[-KEEP:], whole[-KEEP:], rtol=0, atol=1e-5)


def test_decode_after_a_compact_prefill_sees_whole_windows(micro):
    """Rings hold the kept rows; decoding on gives the same as decoding after a masked prefill."""
    ids, results = text(100), []
    for mode in ("mask", "compact"):
        harness = Harness(micro, "smooth", mode, KEEP)
        with torch.inference_mode():
            harness.logits(harness.inputs([(0, ids[:90], 0, 90)]))
            off = harness.truncation.__class__()
            rows = [harness.logits(harness.inputs([(0, ids, p, p + 1)], off)) for p in range(90, 100)]
        results.append(torch.cat(rows))
    torch.testing.assert_close(*results, rtol=0, atol=1e-5)


@pytest.mark.parametrize("mode", ["mask", "compact"])
@pytest.mark.parametrize("keep", [0, 1, 7, 13])
def test_too_small_keep_is_refused_before_loading(micro, mode, keep):
    with pytest.raises(ConfigError, match=r"expected at least 14 \(sliding_window 8 \+ .* 6\)"):
        Harness(micro, "smooth", mode, keep)


def test_modes_together_in_one_batch(micro):
    """Sequences whose prompts are and are not longer than keep share a step."""
    ids = [text(18), text(70), text(45)]
    alone = [forward_logits(micro, one, "smooth", "compact", KEEP) for one in ids]
    harness = Harness(micro, "smooth", "compact", KEEP, sequences=3)
    with torch.inference_mode():
        together = harness.logits(harness.inputs([(i, one, 0, len(one)) for i, one in enumerate(ids)]))
    for expected, got in zip(alone, together.split([len(one) for one in ids]), strict=True):
        torch.testing.assert_close(got, expected, rtol=0, atol=2e-5, equal_nan=True)
