"""Op tables of core's own bodies, for the tests of this folder: small traits, any numerics."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from deepinfer.hooks.api import OpContext, OpGroup
from deepinfer.hooks.bind import bind
from deepinfer.hooks.ops.engram import EngramOps
from deepinfer.hooks.ops.experts import ExpertOps
from deepinfer.hooks.ops.gemm import GemmOps
from deepinfer.hooks.ops.residual import ResidualOps
from deepinfer.hooks.table import OpTable
from deepinfer.hooks.types import ModelTraits, Numerics

EXACT = Numerics()
SMOOTH = Numerics(quantize=False)
ORDER_FREE = Numerics(order_free=True)
SMOOTH_ORDER_FREE = Numerics(quantize=False, order_free=True)

CONTRACTS: Sequence[type[OpGroup]] = (GemmOps, ExpertOps, ResidualOps, EngramOps)

TRAITS = ModelTraits(
    hidden_size=256, num_attention_heads=8, head_dim=512, qk_rope_head_dim=64, q_lora_rank=128, o_lora_rank=128,
    o_groups=2, sliding_window=32, ring=38, index_n_heads=8, index_head_dim=128, index_topk=32,
    candidate_topk_blocks=64, candidate_block_size=8, n_routed_experts=16, num_experts_per_tok=4,
    moe_intermediate_size=128, swiglu_limit=10.0, routed_scaling_factor=1.5, hc_mult=4, hc_sinkhorn_iters=20,
    hc_eps=1e-6, rms_norm_eps=1e-20, vocab_size=512, engram_head_dim=256, engram_n_heads=2, engram_max_ngram_size=4,
    block_size=128, max_positions=4096,
)  # fmt: skip


def op_table(numerics: Numerics, contracts: Sequence[type[OpGroup]] = CONTRACTS) -> OpTable:
    """Core's ops of the four groups, bound without any backend."""
    return bind([], OpContext(torch.device("cpu"), numerics, TRAITS), contracts=contracts)
