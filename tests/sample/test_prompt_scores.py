"""Prompt logprobs: the right row, the request's parameters, bounded memory."""

from __future__ import annotations

import numpy as np
import torch

from deepinfer.sample.logprobs import PromptRows, prompt_logprobs

V, H, Q = 50, 16, 23


def case(seed=0):
    generator = torch.Generator().manual_seed(seed)
    hidden, head = torch.randn(Q, H, generator=generator), torch.randn(V, H, generator=generator).double()
    targets = torch.randint(0, V, (Q,), generator=generator)
    return hidden, targets, lambda rows: (rows.double() @ head.T).float()


def test_default_is_the_raw_log_softmax_of_the_next_token(ops):
    hidden, targets, head = case()
    found = prompt_logprobs(ops, head, hidden, targets)
    expected = head(hidden).double().log_softmax(-1)[torch.arange(Q), targets]
    torch.testing.assert_close(found, expected.float())


def test_chunks_bound_the_logits_and_change_nothing(ops):
    hidden, targets, head = case()
    seen = []

    def counting_head(rows):
        seen.append(len(rows))
        return head(rows)

    params = PromptRows(torch.full((Q,), 0.7), torch.full((Q,), 0.9), torch.full((Q,), 30))
    whole = prompt_logprobs(ops, head, hidden, targets, params)
    parts = prompt_logprobs(ops, counting_head, hidden, targets, params, chunk_rows=5)
    assert seen == [5, 5, 5, 5, 3]
    assert torch.equal(parts, whole)


def test_parameters_apply_row_by_row(ops):
    hidden, targets, head = case()
    logits = head(hidden).double()
    temperature = torch.tensor([1.0, 0.5, 0.0] * 8)[:Q]
    top_k = torch.tensor([-1, 5, 5] * 8)[:Q]
    found = prompt_logprobs(ops, head, hidden, targets, PromptRows(temperature, torch.ones(Q), top_k))
    pruned = 0
    for r in range(Q):
        row = logits[r]
        if r % 3 == 1:
            row = row / 0.5
            row = row.masked_fill(row < row.sort().values[-5], -torch.inf)
        expected = float(row.log_softmax(-1)[targets[r]])  # greedy rows: temperature 1, no filter
        pruned += expected == -np.inf
        np.testing.assert_allclose(found[r], max(expected, -9999.0), rtol=1e-5)
    assert pruned > 0


def test_temperature_without_filters(ops):
    hidden, targets, head = case()
    found = prompt_logprobs(ops, head, hidden, targets, PromptRows(torch.full((Q,), 2.0)))
    expected = (head(hidden).double() / 2).log_softmax(-1)[torch.arange(Q), targets]
    torch.testing.assert_close(found, expected.float())


def test_ids_that_are_no_token_and_broken_rows(ops):
    hidden, targets, head = case()
    targets[2], targets[3] = V + 7, -1
    hidden[5] = torch.nan
    found = prompt_logprobs(ops, head, hidden, targets)
    assert found[2] == -9999
    assert found[3] == -9999
    assert found[5].isnan()
    clean = prompt_logprobs(ops, head, hidden[6:], targets[6:])
    assert torch.equal(found[6:], clean)
    assert prompt_logprobs(ops, head, hidden[:0], targets[:0]).shape == (0,)
