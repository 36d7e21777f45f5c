"""`GrammarDesk`: requests that wait for their grammar, and what a step has to know of the grammars of its sequences.

The engine brings a new request with `so_args` here instead of to the scheduler, and takes it back once its grammar is
compiled; a request that waits here holds nothing and delays nobody. Compiling is `structured.builder`, a request's
state `structured.constraint`.
"""

from __future__ import annotations

import numpy as np

from deepinfer.engine.batch import SlotTable, StepPlan
from deepinfer.engine.sequence import Sequence
from deepinfer.errors import StructuredOutputError
from deepinfer.runner.inputs import StepResult
from deepinfer.structured.builder import GrammarBuilder, Ticket
from deepinfer.structured.constraint import Constraint
from deepinfer.structured.grammar import GrammarSpec
from deepinfer.structured.masks import ConstrainedRows, StepMasks

WAIT_SECONDS = 0.02
"""How long a step without work waits for a grammar, before others get their turn with the engine."""


class GrammarDesk:
    """One per engine. builder: None where there is no tokenizer; whitespace: of requests that do not say."""

    def __init__(self, builder: GrammarBuilder | None, whitespace: str) -> None:
        self._builder, self._whitespace = builder, whitespace
        self._waiting: dict[str, tuple[Sequence, Ticket]] = {}

    def __len__(self) -> int:
        return len(self._waiting)

    def add(self, seq: Sequence) -> None:
        """Have the grammar of a new request compiled. Raises StructuredOutputError."""
        wanted = seq.request.params.structured
        assert wanted is not None
        if self._builder is None:
            raise StructuredOutputError("so_args: structured output needs a tokenizer, and this engine has none")
        spec = GrammarSpec(wanted.schema_type, wanted.schema, wanted.whitespace or self._whitespace)
        self._waiting[seq.request_id] = (seq, self._builder.submit(spec))

    def take_ready(self) -> list[Sequence]:
        """Requests whose grammar is there, now with a constraint, or failed, then finished with the error."""
        ready = [seq for seq, ticket in self._waiting.values() if ticket.done]
        for seq in ready:
            _, ticket = self._waiting.pop(seq.request_id)
            if ticket.grammar is None:
                seq.finish("error", error=ticket.error)
            else:
                assert self._builder is not None
                seq.constraint = Constraint(ticket.grammar, seq.request.params, self._builder.vocabulary)
        return ready

    def discard(self, seq: Sequence) -> None:
        """The request has ended; its grammar is not waited for any more."""
        _, ticket = self._waiting.pop(seq.request_id, (seq, None))
        if ticket is not None:
            assert self._builder is not None
            self._builder.cancel(ticket)

    def wait(self) -> None:
        """For a grammar, a little."""
        if self._builder is not None:
            self._builder.wait(WAIT_SECONDS)

    def masks(self, plan: StepPlan, table: SlotTable) -> StepMasks | None:
        """The promise of the step's masks; None if no row of it needs one."""
        constrained = table.constrained[plan.slots] & plan.sampled
        if not constrained.any():
            return None
        assert self._builder is not None
        counts = plan.q_lens if plan.kind == "decode" else plan.sampled.astype(np.int64)
        firsts = np.cumsum(counts) - counts
        entries = []
        for index in np.flatnonzero(constrained).tolist():
            constraint = plan.sequences[index].constraint
            assert constraint is not None
            entries.append(ConstrainedRows(constraint, int(firsts[index]), int(counts[index])))
        return StepMasks(entries, int(counts.sum()), self._builder.vocabulary.num_words)

    def note_drafts(self, plan: StepPlan, result: StepResult, table: SlotTable) -> None:
        """Tell the constraints of a committed step which drafts their next step verifies."""
        if result.drafts is None or not table.constrained[plan.slots].any():
            return
        for seq, drafts in zip(plan.sampled_sequences(), result.drafts.token_ids.tolist(), strict=True):
            if seq.constraint is not None:
                seq.constraint.drafts = drafts

    def close(self) -> None:
        """End all compiling."""
        if self._builder is not None:
            self._builder.close()


def refused(sequences: list[Sequence], tokens: np.ndarray, errors: list[str | None], rows: np.ndarray) -> None:
    """Show new tokens to the constraints of their sequences; what these refuse becomes an error of the row. [in-place
    errors]

    rows  int64 [m] rows that have a constraint
    """
    for row in rows.tolist():
        seq = sequences[row]
        if seq.constraint is None or seq.finished or errors[row] is not None:
            continue
        if not seq.constraint.accept(int(tokens[row])):
            errors[row] = str(seq.constraint.error)
