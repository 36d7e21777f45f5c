"""Kernels that read a row once and write it once: RMSNorm, e4m3 rounding, SwiGLU and rope, fused as the model needs
them. One program a row, so a row's bits depend on nothing else. Called by `sm90.gemm` and `sm90.attention`.
"""

# No `annotations` import: Triton reads the annotations of its functions.

import torch
import triton
import triton.language as tl

from deepinfer_nvidia.kernels.formats import fake_e4m3
from deepinfer_nvidia.kernels.formats import rounded as nearest


@triton.jit
def _norm(x, weight, normed, rounded, width, eps, BLOCK: tl.constexpr, NORM: tl.constexpr, ROUND: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    channel = tl.arange(0, BLOCK)
    inside = channel < width
    values = tl.load(x + row * width + channel, inside, other=0.0).to(tl.float32)
    if NORM:
        power = tl.sum(values * values, 0) / width + eps
        factors = tl.load(weight + channel, inside, other=0.0).to(tl.float32)
        values = nearest(values * (1.0 / tl.sqrt_rn(power)) * factors, normed.dtype.element_ty)
        tl.store(normed + row * width + channel, values, inside)
        values = values.to(tl.float32)
    if ROUND:
        groups = tl.reshape(values, (1, BLOCK // 32, 32))
        tl.store(rounded + row * width + channel, tl.reshape(fake_e4m3(groups), (BLOCK,)).to(tl.bfloat16), inside)


@triton.jit
def _swiglu(gate_up, row_weight, out, width, limit, WEIGHTED: tl.constexpr, BLOCK: tl.constexpr, ROUND: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    channel = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = channel < width
    gate = tl.load(gate_up + row * 2 * width + channel, inside, other=0.0).to(tl.float32)
    up = tl.load(gate_up + row * 2 * width + width + channel, inside, other=0.0).to(tl.float32)
    gate = tl.where(gate > limit, limit, gate)
    up = tl.where(up > limit, limit, tl.where(up < -limit, -limit, up))
    product = gate / (1.0 + tl.exp(-tl.maximum(gate, -80.0))) * up
    if WEIGHTED:
        product = product * tl.load(row_weight + row)
    if ROUND:
        product = tl.reshape(fake_e4m3(tl.reshape(product, (1, BLOCK // 32, 32))), (BLOCK,))
    tl.store(out + row * width + channel, nearest(product, out.dtype.element_ty), inside)


@triton.jit
def _rope(x, positions, table, out, vectors, width, INVERSE: tl.constexpr, ROPE: tl.constexpr, BLOCK: tl.constexpr):
    """One program a vector; pair i of the last ROPE channels turns by the table's angle i."""
    vector = tl.program_id(0).to(tl.int64)
    place = tl.load(positions + vector // vectors)
    channel = tl.arange(0, BLOCK)
    kept = width - ROPE
    tl.store(out + vector * width + channel, tl.load(x + vector * width + channel, channel < kept), channel < kept)
    pair = tl.arange(0, ROPE // 2)
    start = vector * width + kept + 2 * pair
    even = tl.load(x + start).to(tl.float32)
    odd = tl.load(x + start + 1).to(tl.float32)
    cos = tl.load(table + place * ROPE + pair)
    sin = tl.load(table + place * ROPE + ROPE // 2 + pair)
    if INVERSE:
        sin = -sin
    tl.store(out + start, nearest(even * cos - odd * sin, out.dtype.element_ty))
    tl.store(out + start + 1, nearest(even * sin + odd * cos, out.dtype.element_ty))


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """x [..., d] bfloat16, weight [d] -> [..., d] bfloat16."""
    return _launch_norm(x, weight, eps, norm=True, rounded=False)[0]


def rms_norm_quantize(x: torch.Tensor, weight: torch.Tensor, eps: float) -> tuple[torch.Tensor, torch.Tensor]:
    """The norm, and its bfloat16 result rounded to e4m3 per 32 channels."""
    return _launch_norm(x, weight, eps, norm=True, rounded=True)


def quantize(x: torch.Tensor) -> torch.Tensor:
    """x [..., d] bfloat16 or float32 rounded to e4m3 per 32 channels, as bfloat16."""
    return _launch_norm(x, x, 0.0, norm=False, rounded=True)[1]


def _require(whole: bool, problem: str) -> None:
    if not whole:
        raise ValueError(problem)


def _launch_norm(
    x: torch.Tensor, weight: torch.Tensor, eps: float, norm: bool, rounded: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    x, width = x.contiguous(), x.shape[-1]
    _require(not norm or weight.shape == (width,), f"norm weight is {list(weight.shape)}, expected [{width}]")
    _require(not rounded or width % 32 == 0, f"{width} channels, expected a multiple of 32 to round in groups")
    normed, codes = (torch.empty(x.shape, dtype=torch.bfloat16, device=x.device) for _ in range(2))
    rows, block = x.numel() // max(1, width), max(32, triton.next_power_of_2(width))
    if rows:
        warps = min(16, max(1, block // 512))
        _norm[(rows,)](x, weight, normed, codes, width, eps, BLOCK=block, NORM=norm, ROUND=rounded, num_warps=warps)
    return normed, codes


def swiglu(gate_up: torch.Tensor, limit: float, row_weight: torch.Tensor | None, rounded: bool) -> torch.Tensor:
    """[R, 2 I] -> [R, I]: float32, or bfloat16 rounded to e4m3 per 32 channels."""
    rows, width = gate_up.shape[0], gate_up.shape[1] // 2
    _require(gate_up.shape[1] % 2 == 0, f"gate_up has {gate_up.shape[1]} columns, expected an even number")
    weighed = row_weight is None or row_weight.shape == (rows,)
    _require(weighed, f"row_weight is {None if row_weight is None else list(row_weight.shape)}, expected [{rows}]")
    _require(not rounded or width % 32 == 0, f"{width} channels, expected a multiple of 32 to round in groups")
    out = torch.empty(rows, width, dtype=torch.bfloat16 if rounded else torch.float32, device=gate_up.device)
    block = min(1024, max(32, triton.next_power_of_2(width)))
    if rows:
        weights = gate_up if row_weight is None else row_weight
        _swiglu[(rows, triton.cdiv(width, block))](
            gate_up.contiguous(), weights, out, width, limit, WEIGHTED=row_weight is not None, BLOCK=block,
            ROUND=rounded, num_warps=4,
        )  # fmt: skip
    return out


def rope(x: torch.Tensor, positions: torch.Tensor, table: torch.Tensor, inverse: bool) -> torch.Tensor:
    """x [Q, ..., d] with its last channels turned; same dtype."""
    x, width, turned = x.contiguous(), x.shape[-1], table.shape[-1]
    _require(positions.shape == x.shape[:1], f"positions are {list(positions.shape)}, expected [{x.shape[0]}]")
    out = torch.empty_like(x)
    if x.numel():
        vectors = x.numel() // width // x.shape[0]
        _rope[(x.shape[0] * vectors,)](
            x, positions, table, out, vectors, width, INVERSE=inverse, ROPE=turned,
            BLOCK=triton.next_power_of_2(max(1, width - turned)), num_warps=1,
        )  # fmt: skip
    return out
