"""Sampling ops: masks, the processed distribution, the draw, reported numbers, verification, draft tokens.

Called by `sample.sampler`, `sample.logprobs` and the draft layers of the model. Random numbers are core's Philox
counters, so with equal logits every provider returns the same tokens. Core's bodies compute in float64 whatever the
numerics; a provider may use float32 sums if it states its tolerance.
"""

from __future__ import annotations

import torch

from deepinfer.hooks.api import OpGroup, op
from deepinfer.reference import ranking, rng, speculation
from deepinfer.reference import sampling as reference
from deepinfer.reference.speculation import DraftBlock, Verification


class SamplingOps(OpGroup):
    """From logits to tokens. R rows, V = head rows, n sequences, B drafts a sequence."""

    group = "sampling"

    @op(version=1, level="recommended", status="beta", grain="kernel")
    def prepare(
        self,
        logits: torch.Tensor,
        banned: torch.Tensor | None,
        pairs: torch.Tensor | None,
        allowed: torch.Tensor | None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Apply masks and find rows nothing can be drawn from.

        logits   [R, V] float32
        banned   [b] int64 or None                ids impossible in every row
        pairs    [m, 2] int64 or None             (row, id) that are impossible
        allowed  [R, ceil(V/32)] int32 or None    bit `id % 32` of word `id // 32` set = allowed
        returns  masked [R, V] float32: -inf where forbidden, rows with a status other than 0 all zeros; it may be
                 `logits` itself when there is nothing to change
                 status [R] int64: 0 fine, 1 a NaN, 2 a +inf, 3 no finite logit, 4 every token forbidden
        """
        return reference.prepare(logits, banned, pairs, allowed)

    @op(version=1, level="optional", status="beta", grain="kernel")
    def keep_top(self, logits: torch.Tensor, k: int) -> torch.Tensor:
        """Everything but the k largest logits of a row to -inf, ties: the lower ids stay.

        logits [R, V] float32 without NaN, k >= 1 (k >= V keeps all); returns [R, V] float32
        """
        return ranking.keep_top(logits, k)

    @op(version=1, level="recommended", status="beta", grain="kernel")
    def greedy(self, logits: torch.Tensor) -> torch.Tensor:
        """Id of the largest logit, the lowest id on ties. logits [R, V] float32 without NaN; returns [R] int64."""
        return reference.greedy(logits)

    @op(version=1, level="recommended", status="beta", grain="kernel")
    def process(
        self,
        logits: torch.Tensor,
        temperature: torch.Tensor,
        top_p: torch.Tensor | None,
        top_k: torch.Tensor | None,
    ) -> torch.Tensor:
        """The distribution a row is drawn from, as log-probabilities.

        logits       [R, V] float32, each row with a finite maximum (`prepare`)
        temperature  [R] float32   0 = one-hot on the greedy token
        top_p        [R] float32   >= 1 = off         top_p and top_k are both given or both None (no row filters)
        top_k        [R] int64     < 1 or >= V = off
        raises       ValueError if only one of them is given
        returns      [R, V] float32, -inf for tokens that cannot be drawn

            x = (logits - max) / temperature;  p = softmax(x)
            order = stable descending sort of logits (ties: lower id first)
            top-p: drop a token if the sum of p over the tokens before it exceeds top_p
            top-k: of the survivors keep the first top_k in that order
            logprob = log_softmax of x over the survivors
        """
        return reference.process(logits, temperature, top_p, top_k)

    @op(version=1, level="recommended", status="beta", grain="kernel")
    def draw(
        self,
        logprobs: torch.Tensor,
        seeds: torch.Tensor,
        positions: torch.Tensor,
        purpose: int = rng.PURPOSE_TARGET,
        draft_index: int = 0,
    ) -> torch.Tensor:
        """One token a row, a function of (row's logprobs, seed, position, purpose, draft index) and nothing else.

        logprobs     [R, V] float32   from `process`
        seeds        [R] int64        64-bit seed, two's complement
        positions    [R] int64        absolute index of the token drawn
        purpose      0 target, 1 residual, 2 accept test, 3 independent draft
        returns      [R] int64, -1 if a row has a NaN or no possible token

        Integer arithmetic, so that providers can be compared bit by bit:
            w[v]  = floor(exp(float64 logprob[v]) * 2^31)
            total = sum of w
            words = Philox4x32-10(counter = (position low, position high, purpose, draft index), key = (seed low, high))
            u     = floor(((words[0] >> 1) * 2^31 + (words[1] >> 1)) * total / 2^62)
            token = the lowest v with w[0] + ... + w[v] > u
        """
        return reference.draw(logprobs, seeds, positions, purpose, draft_index)

    @op(version=1, level="optional", status="beta", grain="kernel")
    def score(self, logits: torch.Tensor, ids: torch.Tensor, temperature: torch.Tensor) -> torch.Tensor:
        """Logprob of one token a row without top-p and top-k, bitwise `token_logprobs(process(logits, ...), ids)`.

        logits [R, V] float32 (as for `process`), ids [R] int64 in 0 .. V-1
        temperature [R] float32, 0 counts as 1; returns [R] float32, floor -9999
        """
        return reference.score(logits, ids, temperature)

    @op(version=1, level="optional", status="beta", grain="kernel")
    def token_logprobs(self, logprobs: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        """Logprob of one token a row. logprobs [R, V] float32, ids [R] int64; returns [R] float32, floor -9999."""
        return reference.token_logprobs(logprobs, ids)

    @op(version=1, level="optional", status="beta", grain="kernel")
    def top_logprobs(self, logprobs: torch.Tensor, k: int) -> tuple[torch.Tensor, torch.Tensor]:
        """The k most likely tokens, best first, ties to the lower id.

        logprobs [R, V] float32, 1 <= k <= V; returns ids [R, k] int64 and logprobs [R, k] float32, floor -9999
        """
        return reference.top_logprobs(logprobs, k)

    @op(version=1, level="optional", status="beta", grain="kernel")
    def sum_smaller(self, logprobs: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        """Inclusive ascending CDF at a token: sum of exp(logprob) over all tokens less likely than it, equally likely
        ones with a lower id, and itself.

        logprobs [R, V] float32, ids [R] int64; returns [R] float32
        """
        return ranking.smaller_mass(logprobs, ids)

    @op(version=1, level="optional", status="experimental", grain="block")
    def verify(
        self,
        logprobs: torch.Tensor,
        draft_ids: torch.Tensor,
        row_starts: torch.Tensor,
        row_counts: torch.Tensor,
        seeds: torch.Tensor,
        positions: torch.Tensor,
        golden: torch.Tensor,
        draft_logprobs: torch.Tensor | None,
        rule: str = "coupled",
    ) -> Verification:
        """Which drafts of a step are accepted, and the token after them.

        A sequence brings its drafts and one more row: row j scores draft j, the last row has none (-1).

        logprobs        [R, V] float32   target distributions, from `process`
        draft_ids       [R] int64        the draft each row scores, -1 = none
        row_starts      [n] int64        first row of each sequence
        row_counts      [n] int64        rows of each sequence, >= 1
        seeds           [n] int64
        positions       [n] int64        absolute index of the token row 0 produces; row j produces the j-th after it
        golden          [R] int64        forced token, -1 = free; a draft is then accepted iff it is that token
        draft_logprobs  [R, V] float32   distributions the drafts were drawn from (rejection rule; rows without a draft
                                         are ignored), None under the coupled rule

        coupled    A row's token is the target's own draw, `draw(logprobs, seed, position)`; a draft is accepted iff it
                   is that token. The output is the sequence that would be drawn without drafts, whatever they are.
        rejection  With q, p the probabilities of draft x: accept iff U < min(1, q[x] / p[x]), U from purpose 2; else
                   draw from max(q - p * exp(-5e-5), 0) with purpose 1 (if all of it rounds to 0: the greedy token).
                   Rows without a draft draw as in `draw`. The accept probability is max(1 - sum of that residual, 0).
        """
        return speculation.verify(
            logprobs, draft_ids, row_starts, row_counts, seeds, positions, golden, draft_logprobs, rule
        )

    @op(version=1, level="optional", status="experimental", grain="block")
    def draft_block(
        self,
        base_logits: torch.Tensor,
        hidden: torch.Tensor,
        golden: torch.Tensor,
        markov_embed: torch.Tensor,
        markov_head: torch.Tensor,
        confidence_weight: torch.Tensor,
        confidence_temperature: torch.Tensor,
        temperature: torch.Tensor,
        top_p: torch.Tensor | None,
        top_k: torch.Tensor | None,
        seeds: torch.Tensor,
        positions: torch.Tensor,
        coupled: bool = True,
    ) -> DraftBlock:
        """Draw B drafts a sequence, one after the other, from logits of a single forward of the draft layers.

        base_logits             [n, B, V] float32   head . norm(hidden)
        hidden                  [n, B, H] bfloat16 or float32, before the norm
        golden                  [n] int64           the token just sampled, before draft 0
        markov_embed            [V, r] bfloat16 or float32
        markov_head             [V, r] bfloat16 or float32
        confidence_weight       [H + r] bfloat16 or float32
        confidence_temperature  [B] float32
        temperature, top_p, top_k, seeds   [n] as for `process` and `draw`
        positions               [n] int64           absolute index of the token draft 0 proposes
        coupled                 True: draft i uses the randomness the target will use at its position (needed for
                                acceptance under the coupled rule). False: independent (rejection rule), purpose 3 and
                                draft index i, so that a position's draft of the next step is independent of this one's

            prev = golden; for i in 0 .. B-1:
                e      = markov_embed[prev]
                logits = base_logits[:, i] + markov_head . e                     float32
                conf_i = sigmoid(clamp((concat(hidden[:, i], e) . confidence_weight) / confidence_temperature[i], +-60))
                prev   = d_i = draw(process(logits), seed, position + i)
        """
        dtype = self.numerics.accumulate_dtype
        head, weight = markov_head.to(dtype), confidence_weight.to(dtype)
        purpose = rng.PURPOSE_TARGET if coupled else rng.PURPOSE_DRAFT
        previous, drafts, distributions, confidences = golden, [], [], []
        for i in range(base_logits.shape[1]):
            logits, embedding = speculation.markov_logits(base_logits[:, i], previous, markov_embed, head)
            logprobs = self.ops.sampling.process(logits, temperature, top_p, top_k)
            previous = self.ops.sampling.draw(logprobs, seeds, positions + i, purpose, 0 if coupled else i)
            drafts.append(previous)
            distributions.append(logprobs)
            confidences.append(speculation.confidence(hidden[:, i], embedding, weight, confidence_temperature[i]))
        return DraftBlock(torch.stack(drafts, 1), torch.stack(distributions, 1), torch.stack(confidences, 1))
