"""`Constraint`: where one request stands in the form it has asked for.

It goes through phases: free text until the trigger has been generated, the trigger itself where the bound token forces
it, and text of the grammar until an end token completes it. The commit of a step feeds it every token of the request in
order; before a row is sampled it says which tokens may come there, also after drafts that are not accepted yet. End
tokens
before `min_tokens` are its business, too, since only it knows when nothing else is left. Knows no batch and no device.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum

import numpy as np

from deepinfer.errors import StructuredOutputError
from deepinfer.sampling_params import SamplingParams
from deepinfer.structured.grammar import Grammar, GrammarState
from deepinfer.structured.vocabulary import Vocabulary

ALL = np.int32(-1)
"""A word of a mask that allows everything."""


class Phase(Enum):
    """What the next token belongs to."""

    FREE = "free text before the trigger"
    FORCED = "the trigger, token by token"
    GRAMMAR = "text of the grammar"
    DONE = "nothing: an end token has completed the text"


class Constraint:
    """One request's way through its form.

    error     set when it cannot go on; the request ends with it
    drafts    tokens proposed to follow those accepted, -1 = none
    """

    def __init__(self, grammar: Grammar, params: SamplingParams, vocabulary: Vocabulary) -> None:
        wanted = params.structured
        assert wanted is not None
        self.error: StructuredOutputError | None = None
        self.drafts: Sequence[int] = ()
        self._params, self._vocabulary = params, vocabulary
        self._trigger, self._bound = tuple(wanted.trigger_token_ids), wanted.bound_token_id
        self._borders = _borders(self._trigger)
        self._phase = Phase.FREE if self._trigger else Phase.GRAMMAR
        self._matched = 0
        self._state: GrammarState = grammar.start()
        self._num_tokens = 0
        self._no_eos_until = max(params.first_n_token_no_eos, params.min_tokens)
        self._stop_mask = vocabulary.mask([t for t in params.stop_token_ids if t < vocabulary.size])
        self._extra_stops = frozenset(t for t in params.stop_token_ids if self._is_control(t))
        self._extra_mask = vocabulary.mask(sorted(self._extra_stops))

    @property
    def phase(self) -> Phase:
        """What the next token belongs to."""
        return self._phase

    @property
    def terminated(self) -> bool:
        """The text is complete and an end token has said so."""
        return self._phase is Phase.DONE

    def accept(self, token_id: int) -> bool:
        """Take the request's next token; False, with `error` set, if the form does not allow it."""
        if self.error is None and not self._advance(token_id):
            self.error = self._refusal(token_id)
        self.drafts = ()
        return self.error is None

    def fill(self, rows: np.ndarray) -> None:
        """Write the masks of the next tokens to int32 [k, words]: row 0 for the next one, row j for the one behind the
        first j drafts. Rows behind a draft that cannot be accepted allow everything, since they count for nothing.

        If row 0 would allow nothing, `error` is set, and the row allows everything.
        """
        phase, matched, index, in_grammar = self._phase, self._matched, self._num_tokens, 0
        rows[:] = ALL
        try:
            for at, row in enumerate(rows):
                if self._phase is Phase.DONE:
                    break
                if not self._fill_row(row):
                    row[:] = ALL
                    if at == 0 and self.error is None:
                        self.error = StructuredOutputError("so_args: the grammar allows no token here")
                    break
                draft = self.drafts[at] if at < min(len(self.drafts), len(rows) - 1) else -1
                was_grammar = self._phase is Phase.GRAMMAR
                if draft < 0 or not self._advance(draft):
                    break
                in_grammar += was_grammar and draft not in self._extra_stops
        finally:
            self._state.rollback(in_grammar)
            self._phase, self._matched, self._num_tokens = phase, matched, index

    def fail(self, error: Exception) -> None:
        """The grammar engine has failed; the request ends with this."""
        self.error = StructuredOutputError(f"so_args: the grammar engine failed: {type(error).__name__}: {error}")

    def _advance(self, token_id: int) -> bool:
        """Go on by one token, if it is allowed."""
        if self._phase is Phase.FREE:
            self._match(token_id)
        elif self._phase is Phase.FORCED:
            if token_id != self._trigger[self._matched]:
                return False
            self._matched += 1
        elif self._phase is Phase.DONE:
            return False
        elif token_id in self._extra_stops and self._state.is_complete:
            self._phase = Phase.DONE
        elif not self._state.accept(token_id):
            return False
        elif self._state.is_terminated:
            self._phase = Phase.DONE
        if self._phase in (Phase.FREE, Phase.FORCED) and self._matched == len(self._trigger):
            self._phase = Phase.GRAMMAR
        self._num_tokens += 1
        return True

    def _match(self, token_id: int) -> None:
        """Knuth, Morris and Pratt: how much of the trigger the text ends with after this token."""
        while self._matched and self._trigger[self._matched] != token_id:
            self._matched = self._borders[self._matched]
        self._matched += self._trigger[self._matched] == token_id
        if token_id == self._bound and self._matched < len(self._trigger):
            self._phase, self._matched = Phase.FORCED, 0

    def _fill_row(self, row: np.ndarray) -> bool:
        """The mask of the next token; False if it is empty. The row allows everything before."""
        if self._phase is Phase.FORCED:
            row[:] = 0
            token = self._trigger[self._matched]
            row[token // 32] = np.uint32(1 << token % 32).astype(np.int32)
            return True
        if self._phase is Phase.GRAMMAR:
            self._state.fill_mask(row)
            if self._extra_stops and self._state.is_complete:
                row |= self._extra_mask
        return self._forbid_early_end(row)

    def _forbid_early_end(self, row: np.ndarray) -> bool:
        """Take out end tokens that may not come yet, unless nothing else may; False if the row is empty."""
        if self._num_tokens >= self._no_eos_until:
            return bool(row.any())
        early = self._vocabulary.eos_mask
        if self._num_tokens < self._params.min_tokens:
            early = early | self._stop_mask
        if (row & ~early).any():
            row &= ~early
        return bool(row.any())

    def _is_control(self, token_id: int) -> bool:
        """A stop id that is no text, so that no grammar has a place for it: it counts as an end token."""
        vocabulary = self._vocabulary
        known = token_id < vocabulary.size and token_id not in vocabulary.eos_ids
        return known and not vocabulary.tokens[token_id]

    def _refusal(self, token_id: int) -> StructuredOutputError:
        index, expected = self._num_tokens, "the grammar allows other tokens here"
        if self._phase is Phase.FORCED:
            expected = f"bound_token_id demands token {self._trigger[self._matched]} of trigger_token_ids"
        if self._params.golden_at(index) == token_id:
            return StructuredOutputError(f"golden_token_ids[{index}]={token_id} conflicts with so_args: {expected}")
        return StructuredOutputError(f"so_args: token {token_id} came as number {index} of the output, but {expected}")


def _borders(pattern: tuple[int, ...]) -> list[int]:
    """Entry n: the longest proper beginning of the first n tokens that is also their end."""
    borders = [0] * (len(pattern) + 1)
    length = 0
    for at in range(1, len(pattern)):
        while length and pattern[at] != pattern[length]:
            length = borders[length]
        length += pattern[at] == pattern[length]
        borders[at + 1] = length
    return borders
