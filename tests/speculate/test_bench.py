"""`deepinfer bench`, and batches that are narrowed when their drafts' confidences are known."""

from __future__ import annotations

import json

import numpy as np
import pytest

from deepinfer.cli.main import main
from deepinfer.runner.inputs import StepBatch
from deepinfer.sample.rows import AheadRules, SamplingBatch

TINY = ["bench", "--model", "tiny", "--load-format", "dummy", "--numerics", "smooth", "--max-model-len", "128"]
RUN = [*TINY, "--requests", "2", "--prompt-length", "9", "--max-tokens", "5"]


def test_bench_prints_rates_and_a_profile(capsys):
    assert main([*RUN, "--profile"]) == 0
    out = capsys.readouterr().out
    for text in ("output", "tokens/s", "device waited for host", "host time hidden", "prefill", "decode", "waited ms"):
        assert text in out


def test_bench_with_drafts_as_json(capsys):
    assert main([*RUN, "--profile", "--json", "--set", "use_nextn_decode=2", "--proposer", "ngram"]) == 0
    found = json.loads(capsys.readouterr().out)
    names = [figure["name"] for figure in found["figures"]]
    assert "accepted by position" in names and "calibration error" in names
    assert [step["kind"] for step in found["steps"]][:2] == ["prefill", "decode"]
    assert all(step["busy"] > 0 and step["waited"] >= 0 for step in found["steps"])
    assert sum(step["sequences"] for step in found["steps"]) >= 2 + 2


class Masks:
    cancelled = False

    def result(self, rows=None):
        masks = np.arange(6, dtype=np.int32)[:, None]
        return masks if rows is None else masks[rows]

    def open(self) -> None:
        pass

    def cancel(self) -> None:
        self.cancelled = True


@pytest.mark.parametrize("counts", [[1, 1, 1], [2, 1, 1], [3, 2, 1], [1, 2, 1]])
def test_narrowed_batches_keep_the_first_rows_of_each_sequence(counts):
    planned, rows = np.array([3, 2, 1]), 6
    which = np.arange(rows)
    sampling = SamplingBatch(
        temperature=which.astype(np.float32), top_p=which.astype(np.float32), top_k=which.astype(np.int32),
        seed=which.astype(np.uint64), position=which, num_top_logprobs=which.astype(np.int32), forbid_eos=which > 2,
        golden=which.astype(np.int32), ahead=AheadRules(planned, np.array([5, 6, 7])),
    )  # fmt: skip
    masks = Masks()
    batch = StepBatch(
        step_id=1, kind="decode", slots=np.array([4, 5, 6]), q_starts=np.array([10, 20, 30]), q_lens=planned,
        token_ids=which, history=np.zeros((3, 3), np.int64), block_table=np.zeros((3, 1), np.int32),
        data_lens=np.zeros(3, np.int64), sampled=np.ones(3, bool), sampling=sampling,
        prompt_logprobs=np.zeros(3, bool), prompt_targets=which, optimistic=True, draft=True, masks=masks,
    )  # fmt: skip
    narrow = batch.narrowed(np.array(counts))
    kept = [start + place for start, count in zip((0, 3, 5), counts, strict=True) for place in range(count)]
    assert narrow.q_lens.tolist() == counts == narrow.sampling.ahead.counts.tolist()
    for values in (narrow.token_ids, narrow.prompt_targets, narrow.sampling.seed, narrow.masks.result()[:, 0]):
        assert values.tolist() == kept
    assert narrow.sampling.ahead.eos_from.tolist() == [5, 6, 7]
    assert (narrow.slots.tolist(), narrow.draft, narrow.num_rows) == ([4, 5, 6], True, len(kept))
    narrow.masks.cancel()
    assert masks.cancelled
    assert batch.q_lens.tolist() == [3, 2, 1]
