"""The hyper-connection site as one kernel of DeepGEMM. Created by `groups.create`."""

from __future__ import annotations

import torch

from deepinfer.hooks import ModelTraits, provides
from deepinfer.hooks.ops import ResidualOps
from deepinfer.hooks.ops.residual import Pending, SiteOutput, SiteWeights
from deepinfer_nvidia.libraries import Need
from deepinfer_nvidia.machine import OnMachine
from deepinfer_nvidia.sm100 import limits
from deepinfer_nvidia.sm100.formats import Fp8Tensor, empty_scales

SITE = Need("deep_gemm", {"mega_mhc": ("shifted_prev_mix", "post_mix", "comb_res_mix", "y_bf16", "y_fp8", "y_gemm_sf")})

_POST_SCALE = 2.0
"""Factor of the post weights' sigmoid (model specification 3.3)."""


class Residual(OnMachine, ResidualOps):
    """`site` for every sub-layer but the first, which has nothing to write back."""

    def refuse(self, op: str, traits: ModelTraits) -> list[str]:
        """Chip, numerics, library, and what the kernel's splits divide."""
        reasons = limits.problems(self.machine, self.numerics, SITE)
        reasons += limits.multiple(1024, hidden_size=traits.hidden_size)
        return reasons + limits.one_of((4,), hc_mult=traits.hc_mult)

    @provides(version=1)
    def site(
        self,
        streams: torch.Tensor,
        pending: Pending | None,
        pre_prev: torch.Tensor | None,
        weights: SiteWeights,
        norm_weight: torch.Tensor,
    ) -> SiteOutput:
        """All of it in one launch; not captured, because its first use on a stream allocates."""
        if pending is None or pre_prev is None or not len(streams) or norm_weight.dtype != torch.bfloat16:
            return super().site(streams, pending, pre_prev, weights, norm_weight)
        rows, count, width = streams.shape
        new = {
            "new_residual": torch.empty_like(streams, memory_format=torch.contiguous_format),
            "new_prev_mix": pre_prev.new_empty(rows, count, 1),
            "new_post_mix": pre_prev.new_empty(rows, count, 1),
            "new_comb_res_mix": pre_prev.new_empty(rows, count, count),
            "y_bf16": streams.new_empty(rows, width),
            "y_fp8": streams.new_empty(rows, width, dtype=torch.float8_e4m3fn),
            "y_gemm_sf": empty_scales(rows, width // 128, device=streams.device),
        }
        traits = self.traits
        self.machine.libraries.get("deep_gemm").mega_mhc(
            x=pending.y.contiguous(),
            residual=streams.contiguous(),
            shifted_prev_mix=pre_prev.contiguous().unsqueeze(-1),
            post_mix=pending.post.contiguous().unsqueeze(-1),
            comb_res_mix=pending.comb.contiguous(),
            fn=weights.fn,
            mix_scales=weights.scale,
            mix_bases=weights.base,
            hc_mult=count,
            hc_norm_eps=traits.rms_norm_eps,
            hc_pre_eps=traits.hc_eps,
            hc_post_scale=_POST_SCALE,
            sinkhorn_eps=traits.hc_eps,
            num_sinkhorn_iters=traits.hc_sinkhorn_iters,
            rmsnorm_weight=norm_weight,
            rmsnorm_eps=traits.rms_norm_eps,
            rmsnorm_scale=1.0,
            **new,
        )
        return SiteOutput(
            new["new_residual"], new["new_prev_mix"].squeeze(-1), new["new_post_mix"].squeeze(-1),
            new["new_comb_res_mix"], new["y_bf16"], Fp8Tensor(new["y_fp8"], new["y_gemm_sf"]),
        )  # fmt: skip
