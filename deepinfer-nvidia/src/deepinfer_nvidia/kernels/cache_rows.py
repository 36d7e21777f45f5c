"""Window keys and compressed entries into the published bytes: quantize a row, write it where it belongs.

One program a row. `store_fp8` writes 512 e4m3 codes and their ue8m0 scales and returns the keys as a read returns them;
rows that no ring keeps are only rounded. Called by `sm90.cache`.
"""

# No `annotations` import: Triton reads the annotations of its functions.

import torch
import triton
import triton.language as tl

from deepinfer_nvidia.kernels.formats import e4m3_code, inverse_power, round_e4m3, rounded, scale_bits_e4m3


@triton.jit
def store_fp8(x, target, table, out, DIM: tl.constexpr):
    """target[row]: row of the table, or -1. Grid: rows."""
    row = tl.program_id(0).to(tl.int64)
    group, channel = tl.arange(0, DIM // 32), tl.arange(0, DIM)
    values = tl.reshape(tl.load(x + row * DIM + channel).to(tl.float32), (DIM // 32, 32))
    bits = scale_bits_e4m3(tl.max(tl.abs(values), 1))
    nearest = round_e4m3(values * inverse_power(bits)[:, None])
    back = tl.reshape(nearest * bits.to(tl.float32, bitcast=True)[:, None], (DIM,))
    tl.store(out + row * DIM + channel, rounded(back, tl.bfloat16))
    kept = tl.load(target + row)
    start = table + tl.maximum(kept, 0) * (DIM + DIM // 32)
    tl.store(start + channel, tl.reshape(e4m3_code(nearest, values), (DIM,)), kept >= 0)
    tl.store(start + DIM + group, (bits >> 23).to(tl.uint8), kept >= 0)


def store_window(x: torch.Tensor, rows: torch.Tensor, physical: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
    """Keys x [Q, d] rounded and, for the rows that a ring keeps, written. [in-place table]

    rows, physical  [S] int64: row of x, row of the table uint8 [slots * ring, d + d / 32];  d a power of two
    returns         [Q, d] bfloat16
    """
    count, dim = x.shape
    out = torch.empty(count, dim, dtype=torch.bfloat16, device=x.device)
    if count:
        target = torch.full((count,), -1, dtype=torch.int64, device=x.device).index_copy_(0, rows, physical)
        store_fp8[(count,)](x.contiguous(), target, table, out, DIM=dim, num_warps=triton.cdiv(dim, 256))
    return out
