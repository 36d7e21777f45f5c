"""`PendingRows`: sampled rows that are still on the device.

The sampler makes them; the runner may hand their token ids to the next step before anybody waits for `result`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch

from deepinfer.reference.sampling import (
    LOGPROB_FLOOR,
    STATUS_EMPTY,
    STATUS_INF,
    STATUS_MASKED,
    STATUS_NAN,
    STATUS_OK,
)
from deepinfer.sample.rows import SampledRows, SamplingBatch

_STATUS_TEXT = {
    STATUS_NAN: "non-finite logits: NaN",
    STATUS_INF: "non-finite logits: +inf",
    STATUS_EMPTY: "non-finite logits: no finite value",
    STATUS_MASKED: "no token is allowed by the masks",
}


@dataclass(slots=True)
class PendingRows:
    """Rows whose sampling has been issued on the device; `result` waits for it.

    token_ids  [R] int64 on the device, forced tokens already in place: the feedback of the next step
    accepted   [n] int64 drafts accepted in each sequence; None where every row is a sequence of its own
    positions  [R] int64 absolute index of each row's token, None = those of `batch`
    """

    token_ids: torch.Tensor
    logprobs: torch.Tensor
    status: torch.Tensor
    top: tuple[torch.Tensor, torch.Tensor] | None
    sum_smaller: torch.Tensor | None
    batch: SamplingBatch
    vocab_size: int
    accepted: torch.Tensor | None = None
    positions: torch.Tensor | None = None

    def fetched(self, fetch: Callable[[torch.Tensor], torch.Tensor]) -> PendingRows:
        """The same rows with every tensor replaced by `fetch` of it, e.g. a copy on its way to the host."""

        def each(tensor: torch.Tensor | None) -> torch.Tensor | None:
            return None if tensor is None else fetch(tensor)

        top = None if self.top is None else (fetch(self.top[0]), fetch(self.top[1]))
        return PendingRows(
            fetch(self.token_ids), fetch(self.logprobs), fetch(self.status), top, each(self.sum_smaller),
            self.batch, self.vocab_size, each(self.accepted), each(self.positions),
        )  # fmt: skip

    def result(self) -> SampledRows:
        """Copy to the host and put errors into words."""
        error = self._errors(self.status.cpu().numpy())
        failed = np.array([text is not None for text in error], bool)
        top_ids, top_logprobs = (None, None) if self.top is None else (t.cpu().numpy() for t in self.top)
        return SampledRows(
            token_ids=np.where(failed, -1, self.token_ids.cpu().numpy()),
            logprobs=np.where(failed, np.float32(LOGPROB_FLOOR), self.logprobs.cpu().numpy()),
            top_ids=top_ids,
            top_logprobs=top_logprobs,
            sum_smaller=None if self.sum_smaller is None else self.sum_smaller.cpu().numpy(),
            error=error,
        )

    def _errors(self, status: np.ndarray) -> list[str | None]:
        """One entry a row from its status code and its golden token."""
        error: list[str | None] = [None] * len(status)
        for row in np.flatnonzero(self.batch.golden >= self.vocab_size):
            token, last = self.batch.golden[row], self.vocab_size - 1
            error[row] = f"golden_token_ids: {token} is outside the vocabulary, ids are 0 .. {last}"
        positions = self.batch.position if self.positions is None else self.positions.cpu().numpy()
        for row in np.flatnonzero(status != STATUS_OK):
            error[row] = f"{_STATUS_TEXT[int(status[row])]}; no token for position {positions[row]}"
        return error
