"""What the kit knows of every op: `op_infos()`, and what its records are made of.

`op_infos()[name].samples(SampleContext)` gives operands for an op of any table; the levels of `testing.conformance` run
them. Importing this package imports torch.
"""

from __future__ import annotations

import importlib

from deepinfer.hooks.ops import CONTRACTS, contracts
from deepinfer.testing.opinfo.context import SampleContext, Trio
from deepinfer.testing.opinfo.record import Batch, Check, Cost, ErrorSample, OpInfo, Sample

__all__ = ["Batch", "Check", "Cost", "ErrorSample", "OpInfo", "Sample", "SampleContext", "Trio", "op_infos"]


def op_infos(*groups: str) -> dict[str, OpInfo]:
    """{op: record} of the groups named, or of all, in the order of the contracts."""
    wanted = groups or tuple(group for group, _ in CONTRACTS)
    found = {group: {i.name: i for i in importlib.import_module(f"{__name__}.{group}").INFOS} for group in wanted}
    specs = [spec for contract in contracts() if contract.group in found for spec in contract.op_specs.values()]
    return {spec.name: found[spec.group][spec.name] for spec in specs}
