"""From a loaded backend to the op table of a run: the one call of workers, `deepinfer ops` and tests of real ops."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence

from deepinfer.hooks import report
from deepinfer.hooks.api import OpContext
from deepinfer.hooks.bind import Contribution, Factory, bind
from deepinfer.hooks.load import LoadedBackend, factories
from deepinfer.hooks.ops import contracts
from deepinfer.hooks.table import OpTable
from deepinfer.hooks.trace import Tracer, Wrapper

logger = logging.getLogger("deepinfer.hooks")


def build_ops(
    loaded: LoadedBackend,
    context: OpContext,
    overrides: Iterable[str] = (),
    trace: str | None = None,
    wrappers: Sequence[Wrapper] = (),
) -> OpTable:
    """Create every op group's objects and bind all ops.

    overrides  "PATTERN=PROVIDER"; they refine those of `context.settings.ops`
    trace      "count", "time", "shapes" or None for `context.settings.trace_ops`; read the result at `table.tracer`
    wrappers   further wrappers of bound calls, inside the tracer

    `context.settings` also decides `strict_ops` and `batch_invariant`; without settings both are off. Call once per
    engine and worker, before weights are loaded. Raises what `bind` raises.
    """
    settings = context.settings
    mode = trace or (settings.trace_ops if settings is not None else None)
    table = bind(
        contributions(loaded),
        context,
        (*(settings.ops if settings is not None else ()), *overrides),
        strict=settings is not None and settings.strict_ops,
        batch_invariant=settings is not None and settings.batch_invariant,
        wrappers=(*wrappers, Tracer(mode)) if mode else tuple(wrappers),
    )
    fallen = report.refusals(table)
    if fallen:
        logger.warning("ops that their preferred provider cannot serve here:\n%s", fallen)
    logger.info("op table: %s", report.summary(table))
    return table


def contributions(loaded: LoadedBackend) -> list[Contribution]:
    """The factories of every loaded plugin, most preferred first."""
    made: dict[str, dict[str, Factory]] = {provider.name: {} for provider in loaded.providers}
    for contract in contracts():
        for name, factory in factories(loaded.manager, contract.factory).items():
            made[name][contract.group] = factory
    return [Contribution(provider, made[provider.name]) for provider in loaded.providers]
