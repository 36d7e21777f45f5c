"""The data that crosses a hook: numerics, weights, quantized activations, a step's integer metadata, caches.

Used by the model (which fills them), the op contracts in `hooks/ops/` (which document them) and backends (which
receive them). Nothing here knows a device.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch


@dataclass(frozen=True, slots=True)
class Numerics:
    """How numbers are rounded. `exact` follows the checkpoint's formats step by step, `smooth` rounds nowhere.

    quantize      True (*exact*): bf16 activations, every quantizer applied; False (*smooth*): float32 throughout,
                  weights dequantized once, differentiable.
    order_free    accumulate in float64 and round once, so that a sum does not depend on the number of rows
                  (the batch-invariant variant of the reference).
    packed_cache  caches hold the published bytes; False keeps plain values (differentiable, larger).
    """

    quantize: bool = True
    order_free: bool = False
    packed_cache: bool = True

    def __post_init__(self) -> None:
        if self.packed_cache and not self.quantize:
            object.__setattr__(self, "packed_cache", False)

    @property
    def activation_dtype(self) -> torch.dtype:
        """dtype of activations between ops."""
        return torch.bfloat16 if self.quantize else torch.float32

    @property
    def accumulate_dtype(self) -> torch.dtype:
        """dtype sums are formed in."""
        return torch.float64 if self.order_free else torch.float32


EXACT = Numerics()
SMOOTH = Numerics(quantize=False)


@dataclass(frozen=True, slots=True)
class Weight:
    """A weight as the checkpoint stores it: the *logical* weight a backend's `prepare_weight` starts from.

    format        values                       scales (uint8, value 2^(byte-127))   logical shape
    bf16, f32     same dtype [..., out, in]    None                                 [..., out, in]
    fp8_block32   float8_e4m3fn [out, in]      [ceil(out/32), ceil(in/32)]          [out, in]
    fp8_row32     float8_e4m3fn [rows, in]     [rows, in/32]                        [rows, in]
    mxfp4_row32   uint8 [..., out, in/2]       [..., out, in/32]                    [..., out, in]
                  (even channel in the low nibble)
    """

    values: torch.Tensor
    scales: torch.Tensor | None
    format: str

    @property
    def shape(self) -> tuple[int, ...]:
        """Logical shape."""
        if self.format == "mxfp4_row32":
            return (*self.values.shape[:-1], self.values.shape[-1] * 2)
        return tuple(self.values.shape)

    @property
    def nbytes(self) -> int:
        """Bytes of values and scales as stored."""
        scales = 0 if self.scales is None else self.scales.nbytes
        return self.values.nbytes + scales


@dataclass(frozen=True, slots=True)
class QuantTensor:
    """Activations after a quantizer, opaque to the model. Core's own layout keeps the *dequantized* values.

    values   [..., K]  bfloat16 (every e4m3 x power of two fits), float32 in smooth mode
    A backend subclasses this with its own storage and overrides `dequantize`; a consumer that meets a foreign
    layout calls `dequantize()` and quantizes again, which is lossless.
    """

    values: torch.Tensor

    def dequantize(self) -> torch.Tensor:
        """Values [..., K] in the activation dtype."""
        return self.values

    def take(self, rows: torch.Tensor) -> QuantTensor:
        """Rows [R] int64 of a tensor [Q, ...]."""
        return QuantTensor(self.values[rows])


@dataclass(frozen=True, slots=True)
class ModelTraits:
    """Static sizes of the model, what `refuse(op, traits)` decides on. Names follow the checkpoint's config keys."""

    hidden_size: int
    num_attention_heads: int
    head_dim: int
    qk_rope_head_dim: int
    q_lora_rank: int
    o_lora_rank: int
    o_groups: int
    sliding_window: int
    ring: int
    """rows of a window ring: sliding_window + backtracking"""
    index_n_heads: int
    index_head_dim: int
    index_topk: int
    candidate_topk_blocks: int
    candidate_block_size: int
    n_routed_experts: int
    num_experts_per_tok: int
    moe_intermediate_size: int
    swiglu_limit: float
    routed_scaling_factor: float
    hc_mult: int
    hc_sinkhorn_iters: int
    hc_eps: float
    rms_norm_eps: float
    vocab_size: int
    engram_head_dim: int
    engram_n_heads: int
    engram_max_ngram_size: int
    block_size: int
    """tokens of a paged cache block"""
    max_positions: int
    """exclusive bound of every position used at run time"""


@dataclass(frozen=True, slots=True)
class SequenceSpan:
    """A run of consecutive sequences of a step that bring the same number of rows, so ops can batch over them.

    first, count  sequences first .. first + count - 1
    row_start     first row of the span; it covers count * q_len rows
    max_context   largest context length (positions seen so far, this step included) in the span
    """

    first: int
    count: int
    row_start: int
    q_len: int
    max_context: int

    @property
    def sequences(self) -> slice:
        """Index of the span's sequences."""
        return slice(self.first, self.first + self.count)

    @property
    def rows(self) -> slice:
        """Index of the span's rows."""
        return slice(self.row_start, self.row_start + self.count * self.q_len)


@dataclass(frozen=True, slots=True)
class EntryRows:
    """Compressed entries that the rows of a step complete, for one ratio r. All int64 [M].

    Steps built by `step_inputs.build_ahead` list every row; what a row writes that completes no entry goes to the null
    block, where several rows may meet and nobody reads.

    rows      row of the step whose token completes the entry (position % r == r - 1)
    index     entry number j within its sequence (tokens j*r .. j*r + r-1)
    physical  row of the paged cache: block * (block_size // r) + offset
    """

    rows: torch.Tensor
    index: torch.Tensor
    physical: torch.Tensor


@dataclass(frozen=True, slots=True)
class RingRows:
    """Rows of a step that rings of `length` slots keep: the last `length` of each sequence, and of prefill steps also
    those before positions whose state goes to a further slot (a row may then occur twice). All int64 [S].

    rows      row of the step        physical  slot * length + position % length; no value occurs twice
    """

    rows: torch.Tensor
    physical: torch.Tensor


@dataclass(slots=True)
class StepInputs:
    """Integer metadata of a step, flattened over its sequences: Q rows of n sequences. Built once a step, on device.

    positions    [Q]     int64   absolute position of each row's token
    sequence     [Q]     int64   which of the n sequences a row belongs to
    q_starts     [n]     int64   position of each sequence's first row
    row_starts   [n]     int64   first row of each sequence
    slots        [n]     int64   state slot (window rings, compressor state)
    block_table  [n, B]  int64   paged blocks in order; unused entries are 0, the null block
    window_lo    [Q]     int64   first position a row sees in its window; > position: none
    entries      {ratio: EntryRows}
    rings        {ring length: RingRows}
    spans        SequenceSpans covering all rows in order (host data)
    in_ring      every sequence brings so few rows that, once they are stored, their whole windows lie in the rings
    plan         result of `attention.plan`
    scratch      memory of ops for what they derive once a step and share between layers
    """

    positions: torch.Tensor
    sequence: torch.Tensor
    q_starts: torch.Tensor
    row_starts: torch.Tensor
    slots: torch.Tensor
    block_table: torch.Tensor
    window_lo: torch.Tensor
    entries: dict[int, EntryRows]
    rings: dict[int, RingRows]
    spans: tuple[SequenceSpan, ...]
    in_ring: bool
    plan: Any = None
    scratch: dict[Any, Any] = field(default_factory=dict)

    @property
    def num_rows(self) -> int:
        """Q."""
        return self.positions.shape[0]

    @property
    def num_sequences(self) -> int:
        """n."""
        return self.q_starts.shape[0]


@dataclass(frozen=True, slots=True)
class StepViews:
    """The two views of a step: the encoder half sees every row, the decoder half those that truncation keeps.

    kept_rows  [Qd] int64 rows of `encoder` that `decoder` consists of; None when both are the same object or
               differ only in `window_lo` and `rings`
    """

    encoder: StepInputs
    decoder: StepInputs
    kept_rows: torch.Tensor | None


@dataclass(slots=True)
class Selection:
    """Compressed entries each row attends to, as an index source chose them; shared by the layers that reuse it.

    entries  [Q, T] int64 entry numbers, ascending, -1 padding at the end
    ratio    tokens an entry stands for
    """

    entries: torch.Tensor
    ratio: int


@dataclass(frozen=True, slots=True)
class CacheSpec:
    """What a sequence leaves behind, as data. Backends turn it into memory (`cache.allocate`).

    block_size         tokens of a paged block
    ring               rows of a window ring
    window_layers      number of window rings per slot (backbone layers, then draft layers)
    compressed         {source layer: ratio}  paged compressed KV, head_dim channels
    index              {source layer: ratio}  paged index keys, index_head_dim channels
    state              {source layer: ring rows}  compressor state of ratio-2 sources, [rows, 2, head_dim] float32
    compressed_format  "fp4" (288 bytes an entry) or "fp8" (528)
    """

    block_size: int
    ring: int
    window_layers: int
    head_dim: int
    index_head_dim: int
    compressed: dict[int, int]
    index: dict[int, int]
    state: dict[int, int]
    compressed_format: str = "fp4"

    def bytes_per_block(self) -> int:
        """Published bytes of one paged block over all layers (model card: 890 bytes a token for V4.1-Flash)."""
        main = 9 * self.head_dim // 16 if self.compressed_format == "fp4" else 33 * self.head_dim // 32
        index = 17 * self.index_head_dim // 32
        entries = sum(self.block_size // r * main for r in self.compressed.values())
        return entries + sum(self.block_size // r * index for r in self.index.values())

    def bytes_per_slot(self) -> int:
        """Published bytes of one state slot: FP8 window rings plus float32 compressor state."""
        rings = self.window_layers * self.ring * (33 * self.head_dim // 32)
        return rings + sum(rows * 2 * self.head_dim * 4 for rows in self.state.values())


@dataclass(slots=True)
class KVCache:
    """The caches of one worker. `storage` is private to the provider of the cache ops."""

    spec: CacheSpec
    num_blocks: int
    num_slots: int
    storage: Any
