"""What samples are made for: an op table with its device and numerics, and the random numbers they consist of.

Three contexts of the same seed (`Trio`) give operands of equal value: for the subject on its device, for core's
reference in the same numerics, and for the float64 yardstick. Numbers are drawn on the host and rounded once to the
model's dtype; only then do they go to a device or to float64.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import torch

from deepinfer.hooks import ModelTraits, Numerics, OpContext, OpTable, QuantTensor, Weight
from deepinfer.models.deepseek_v41.config import VisionConfig
from deepinfer.reference import quant
from deepinfer.testing import yardstick
from deepinfer.testing.subject import IN_PROCESS, Subject

T = TypeVar("T")


@dataclass(frozen=True)
class SampleContext:
    """One op table and everything that decides a sample's operands.

    ops      the table they are made for
    context  what it was bound with
    vision   sizes of the image tower
    seed     of all random numbers
    ideal    this is the float64 yardstick
    backend  name by which other processes open the subject's backend, None where they cannot
    scope    op and sample the next numbers are for
    """

    ops: OpTable
    context: OpContext
    vision: VisionConfig
    seed: int = 0
    ideal: bool = False
    backend: str | None = None
    scope: str = ""

    @property
    def device(self) -> torch.device:
        return torch.device(self.context.device)

    @property
    def numerics(self) -> Numerics:
        return self.context.numerics

    @property
    def traits(self) -> ModelTraits:
        return self.context.traits

    @property
    def model_dtype(self) -> torch.dtype:
        """dtype of activations in the numerics under test, also in the yardstick."""
        return torch.bfloat16 if self.numerics.quantize else torch.float32

    def at(self, scope: str) -> SampleContext:
        """The context of a part of this one: its own random numbers."""
        return replace(self, scope=f"{self.scope}/{scope}" if self.scope else scope)

    def reseeded(self, seed: int) -> SampleContext:
        """The same table with other numbers."""
        return replace(self, seed=seed)

    # numbers, on the host

    def generator(self, label: str) -> torch.Generator:
        return torch.Generator().manual_seed(zlib.crc32(f"{self.seed}/{self.scope}/{label}".encode()))

    def normal(self, label: str, *shape: int, scale: float = 1.0) -> torch.Tensor:
        """Normal numbers, float32."""
        return torch.randn(*shape, generator=self.generator(label)) * scale

    def uneven(self, label: str, rows: int, *shape: int) -> torch.Tensor:
        """Normal numbers whose groups of 32 channels differ in size, so that each needs a scale of its own."""
        groups = -(-shape[-1] // 32)
        sizes = self.integers(f"{label} sizes", -2, 3, rows, *shape[:-1], groups).float().exp2()
        return self.normal(label, rows, *shape) * sizes.repeat_interleave(32, -1)[..., : shape[-1]]

    def uniform(self, label: str, *shape: int) -> torch.Tensor:
        """Numbers in [0, 1), float32."""
        return torch.rand(*shape, generator=self.generator(label))

    def integers(self, label: str, low: int, high: int, *shape: int) -> torch.Tensor:
        """Integers in [low, high), int64."""
        return torch.randint(low, high, shape, generator=self.generator(label))

    def extreme(self, label: str, rows: int, *shape: int) -> torch.Tensor:
        """Rows of very different size: tiny, huge, all zero, one spike, ordinary ones. float32 [rows, ...]."""
        x = self.normal(label, rows, *shape)
        scales = torch.tensor([1e-3, 2.0**12, 0.0, 1.0, 2.0**-40, 2.0**6])[torch.arange(rows) % 6]
        x = x * scales.view(-1, *[1] * len(shape))
        x.view(rows, -1)[3::6, 0] = 3e4
        return x

    # operands

    def put(self, x: torch.Tensor) -> torch.Tensor:
        """A copy on the table's device."""
        return x.clone() if self.device.type == "cpu" else x.to(self.device)

    def activation(self, x: torch.Tensor) -> torch.Tensor:
        """Host numbers as activations."""
        return self.put(x.to(self.model_dtype).to(self.numerics.activation_dtype))

    def float32(self, x: torch.Tensor) -> torch.Tensor:
        """Host numbers as a float32 operand; in the yardstick the same numbers in float64."""
        x = x.to(torch.float32)
        return self.put(x.to(torch.float64) if self.ideal else x)

    def quantized(self, x: torch.Tensor) -> QuantTensor:
        """Host numbers as activations, quantized by the table's own op."""
        return self.ops.gemm.quantize(self.activation(x))

    def foreign(self, x: torch.Tensor) -> QuantTensor:
        """Quantized activations in a layout no provider knows."""
        if not self.numerics.quantize:
            return self.quantized(x)
        codes, scales = quant.encode_q8(x.to(self.model_dtype))
        return ForeignQuant(self.put(codes), self.put(scales))

    def weight(self, label: str, out: int, width: int, kind: str) -> Weight:
        """A dense weight [out, width] as a checkpoint stores it."""
        return self.place(random_weight(self.generator(label), (out, width), kind))

    def dense(self, label: str, out: int, width: int, kind: str) -> Any:
        """A prepared dense weight."""
        return self.ops.gemm.prepare_weight(self.weight(label, out, width, kind))

    def expert_weight(self, label: str, experts: int, out: int, width: int, kind: str = "mxfp4_row32") -> Weight:
        """Stacked experts [experts, out, width] as a checkpoint stores them."""
        return self.place(random_weight(self.generator(label), (experts, out, width), kind))

    def experts(self, label: str, experts: int, out: int, width: int, kind: str = "mxfp4_row32") -> Any:
        """Prepared experts."""
        return self.ops.gemm.prepare_expert_weight(self.expert_weight(label, experts, out, width, kind))

    def place(self, weight: Weight) -> Weight:
        """A weight as stored, on the table's device."""
        scales = None if weight.scales is None else self.put(weight.scales)
        return Weight(self.put(weight.values), scales, weight.format)


@dataclass(frozen=True, slots=True)
class ForeignQuant(QuantTensor):
    """Quantized activations as codes and scales: `values` holds uint8 e4m3 codes, `scales` ue8m0 bytes."""

    scales: torch.Tensor

    def dequantize(self) -> torch.Tensor:
        return quant.decode_q8(self.values, self.scales)

    def take(self, rows: torch.Tensor) -> ForeignQuant:
        return ForeignQuant(self.values[rows], self.scales[rows])


SCALES = {"fp8_block32": (114, 119), "fp8_row32": (114, 119), "mxfp4_row32": (119, 124)}
"""Range of scale bytes of random weights; a weight's numbers come out at about 0.05."""


def random_weight(generator: torch.Generator, shape: tuple[int, ...], kind: str) -> Weight:
    """A weight [..., out, in] in a storage format of `Weight`, its scales all over `SCALES`.

    A scale taken from the wrong block shows, as it would not if all were about equal.
    """
    if kind in ("bf16", "f32"):
        numbers = torch.randn(*shape, generator=generator) * 0.05
        return Weight(numbers.to(torch.bfloat16) if kind == "bf16" else numbers, None, kind)
    *stack, out, width = shape
    rows = -(-out // 32) if kind == "fp8_block32" else out
    scales = torch.randint(*SCALES[kind], (*stack, rows, -(-width // 32)), generator=generator).to(torch.uint8)
    if kind == "mxfp4_row32":
        return Weight(
            torch.randint(0, 256, (*stack, out, width // 2), generator=generator, dtype=torch.uint8), scales, kind
        )
    return Weight((torch.randn(*shape, generator=generator) * 100).to(torch.float8_e4m3fn), scales, kind)


def once(make: Callable[[], T]) -> Callable[[], T]:
    """A function that calls `make` the first time and gives the same object ever after."""
    made: list[T] = []

    def get() -> T:
        if not made:
            made.append(make())
        return made[0]

    return get


@dataclass(frozen=True)
class Trio:
    """The three contexts of one comparison. `shared` holds what the checks of one run make once."""

    found: SampleContext
    working: SampleContext
    ideal: SampleContext
    shared: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, subject: Subject, seed: int | None = None) -> Trio:
        """Contexts of a subject. seed: None takes the subject's."""
        context, vision = subject.context, subject.config.vision
        seed = subject.seed if seed is None else seed
        working = SampleContext(yardstick.working_table(context), yardstick.working_context(context), vision, seed)
        ideal = SampleContext(
            yardstick.ideal_table(context), yardstick.ideal_context(context), vision, seed, ideal=True
        )
        installed = subject.loaded.providers[-1].distribution != IN_PROCESS
        backend = subject.name if installed else None
        return cls(SampleContext(subject.ops, context, vision, seed, backend=backend), working, ideal)

    @property
    def all(self) -> tuple[SampleContext, SampleContext, SampleContext]:
        return self.found, self.working, self.ideal

    def at(self, scope: str) -> Trio:
        """All three at a scope."""
        return Trio(*(ctx.at(scope) for ctx in self.all), self.shared)
