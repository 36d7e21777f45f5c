"""VisionOps against an independent restatement in plain float64 loops, in all rounding modes; gradients; errors."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace

import pytest
import torch

from deepinfer.errors import RequestError
from deepinfer.hooks.api import OpContext
from deepinfer.hooks.ops.attention import AttentionOps
from deepinfer.hooks.ops.vision import VisionOps
from deepinfer.hooks.types import EXACT, SMOOTH, Numerics
from deepinfer.reference.vision import VisionWeights
from deepinfer.reference.vision_geometry import TokenKind

ORDER_FREE = Numerics(order_free=True)
TEXT_WIDTH = 40
GRIDS = [(4, 5), (1, 1), (3, 6)]


@dataclass(frozen=True)
class Sizes:
    num_hidden_layers: int = 3
    hidden_size: int = 24
    num_attention_heads: int = 3
    intermediate_size: int = 32
    patch_size: int = 4
    rope_theta: float = 10000.0
    downsample_ratio: int = 3
    max_image_tokens: int = 64
    min_pixels: int = 100
    max_wh_ratio: float | None = None


SIZES = Sizes()


def make_ops(numerics: Numerics) -> VisionOps:
    context = OpContext(torch.device("cpu"), numerics, traits=None)
    vision, attention = VisionOps(context), AttentionOps(context)
    vision.ops = attention.ops = SimpleNamespace(vision=vision, attention=attention)
    return vision


def make_tensors(dtype: torch.dtype, sizes: Sizes = SIZES) -> dict[str, torch.Tensor]:
    """Random tensors under their checkpoint names, with values bfloat16 can hold."""
    d, i, r, h = sizes.hidden_size, sizes.intermediate_size, sizes.downsample_ratio, TEXT_WIDTH
    shapes = {
        "vision.patch_embed.proj.weight": (d, 3 * sizes.patch_size**2), "vision.patch_embed.proj.bias": (d,),
        "vision.norm.weight": (d,),
        "aligner.w1.weight": (h, r * r * d), "aligner.w1.bias": (h,),
        "aligner.w2.weight": (h, h), "aligner.w2.bias": (h,),
        "image_start": (h,), "image_newline": (h,), "image_end": (h,),
    }  # fmt: skip
    for block in range(sizes.num_hidden_layers):
        at = f"vision.blocks.{block}"
        shapes |= {
            f"{at}.norm1.weight": (d,), f"{at}.norm2.weight": (d,),
            f"{at}.attn.wqkv.weight": (3 * d, d), f"{at}.attn.wqkv.bias": (3 * d,),
            f"{at}.attn.wo.weight": (d, d), f"{at}.attn.wo.bias": (d,),
            f"{at}.mlp.w1.weight": (2 * i, d), f"{at}.mlp.w2.weight": (d, i),
        }  # fmt: skip
    generator = torch.Generator().manual_seed(3)
    tensors = {}
    for name, shape in shapes.items():
        values = torch.randn(shape, generator=generator) * (shape[-1] ** -0.5 if len(shape) == 2 else 0.3)
        tensors[name] = (values + (1 if "norm" in name else 0)).to(torch.bfloat16).to(dtype)
    return tensors


def make_patches(dtype: torch.dtype, grids: list[tuple[int, int]] = GRIDS) -> torch.Tensor:
    count = sum(rows * columns for rows, columns in grids)
    values = torch.rand(count, 3, 4, 4, generator=torch.Generator().manual_seed(5)) * 2 - 1
    return values.to(torch.bfloat16).to(dtype)


# An independent statement of the tower: one image at a time, float64, explicit loops; `rounded` after every step.

Round = Callable[[torch.Tensor], torch.Tensor]


def plain_norm(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return x / (x.pow(2).mean(-1, keepdim=True) + 1e-6).sqrt() * weight


def plain_rope(x: torch.Tensor, row: int, column: int, theta: float) -> torch.Tensor:
    """One head's vector [d] of the patch at (row, column)."""
    d, out = x.shape[0], x.clone()
    quarter = d // 4
    for i in range(d // 2):
        place = row if i < quarter else column
        angle = float(torch.tensor(place * theta ** (-2 * (i % quarter) / (d // 2)), dtype=torch.float32))
        a, b = x[i], x[i + d // 2]
        out[i] = a * math.cos(angle) - b * math.sin(angle)
        out[i + d // 2] = a * math.sin(angle) + b * math.cos(angle)
    return out


def plain_tower(x: torch.Tensor, grid: tuple[int, int], t: dict[str, torch.Tensor], rounded: Round) -> torch.Tensor:
    """x [patches, 3, p, p] of one image."""
    sizes, (rows, columns) = SIZES, grid
    heads, d = sizes.num_attention_heads, sizes.hidden_size // sizes.num_attention_heads
    x = rounded(x.flatten(1) @ t["vision.patch_embed.proj.weight"].T + t["vision.patch_embed.proj.bias"])
    unrounded = x
    for block in range(sizes.num_hidden_layers):
        w = {name.split(f"blocks.{block}.")[1]: value for name, value in t.items() if f"blocks.{block}." in name}
        normed = rounded(plain_norm(unrounded, w["norm1.weight"]))
        qkv = rounded(normed @ w["attn.wqkv.weight"].T + w["attn.wqkv.bias"])
        out = torch.zeros_like(x)
        for head in range(heads):
            q, k, v = (qkv[:, part * heads * d + head * d :][:, :d] for part in range(3))
            places = [(r, c) for r in range(rows) for c in range(columns)]
            q = rounded(torch.stack([plain_rope(q[n], *place, sizes.rope_theta) for n, place in enumerate(places)]))
            k = rounded(torch.stack([plain_rope(k[n], *place, sizes.rope_theta) for n, place in enumerate(places)]))
            weights = torch.exp(q @ k.T / math.sqrt(d))
            out[:, head * d : (head + 1) * d] = rounded(weights / weights.sum(1, keepdim=True) @ v)
        unrounded = x + rounded(out @ w["attn.wo.weight"].T + w["attn.wo.bias"])
        x = rounded(unrounded)
        normed = rounded(plain_norm(unrounded, w["norm2.weight"]))
        gate, up = rounded(normed @ w["mlp.w1.weight"].T).split(sizes.intermediate_size, 1)
        hidden = rounded(gate / (1 + torch.exp(-gate)) * up)
        unrounded = x + rounded(hidden @ w["mlp.w2.weight"].T)
        x = rounded(unrounded)
        if block % 2 == 1:
            unrounded = x
    return rounded(plain_norm(unrounded, t["vision.norm.weight"]))


def plain_aligner(x: torch.Tensor, grid: tuple[int, int], t: dict[str, torch.Tensor], rounded: Round) -> torch.Tensor:
    (rows, columns), ratio, features = grid, SIZES.downsample_ratio, []
    for top in range(0, rows, ratio):
        for left in range(0, columns, ratio):
            feature = torch.zeros(x.shape[1], ratio, ratio, dtype=x.dtype)
            for dy in range(min(ratio, rows - top)):
                for dx in range(min(ratio, columns - left)):
                    feature[:, dy, dx] = x[(top + dy) * columns + left + dx]
            features.append(feature.flatten())
    hidden = rounded(torch.stack(features) @ t["aligner.w1.weight"].T + t["aligner.w1.bias"])
    hidden = rounded(hidden / 2 * (1 + torch.erf(hidden / math.sqrt(2))))
    return rounded(hidden @ t["aligner.w2.weight"].T + t["aligner.w2.bias"])


def plain(rounded: Round) -> tuple[torch.Tensor, torch.Tensor]:
    """(tower output, features) of all images in float64."""
    tensors = {name: value.double() for name, value in make_tensors(torch.bfloat16).items()}
    patches = make_patches(torch.float64).split([rows * columns for rows, columns in GRIDS])
    towers = [plain_tower(image, grid, tensors, rounded) for image, grid in zip(patches, GRIDS, strict=True)]
    features = [plain_aligner(image, grid, tensors, rounded) for image, grid in zip(towers, GRIDS, strict=True)]
    return torch.cat(towers), torch.cat(features)


def run(numerics: Numerics) -> tuple[torch.Tensor, torch.Tensor]:
    vision = make_ops(numerics)
    weights = VisionWeights.from_tensors(make_tensors(torch.bfloat16), SIZES.num_hidden_layers)
    tower = vision.encode(make_patches(numerics.activation_dtype), GRIDS, weights, SIZES)
    return tower, vision.align(tower, GRIDS, weights, SIZES)


def bf16(x: torch.Tensor) -> torch.Tensor:
    return x.to(torch.bfloat16).double()


def test_smooth_equals_the_plain_statement() -> None:
    for found, expected in zip(run(SMOOTH), plain(lambda x: x), strict=True):
        assert found.dtype == torch.float32
        torch.testing.assert_close(found.double(), expected, rtol=2e-5, atol=2e-5)


def test_order_free_exact_equals_the_plain_statement_bit_for_bit() -> None:
    for found, expected in zip(run(ORDER_FREE), plain(bf16), strict=True):
        assert found.dtype == torch.bfloat16
        assert torch.equal(found.double(), expected)


def test_exact_is_close_to_the_plain_statement() -> None:
    for found, expected in zip(run(EXACT), plain(bf16), strict=True):
        error = (found.double() - expected).pow(2).mean().sqrt() / expected.pow(2).mean().sqrt()
        assert found.dtype == torch.bfloat16 and error < 5e-3, error


def test_exact_differs_from_smooth_by_rounding_only() -> None:
    exact, smooth = run(EXACT)[1].float(), run(SMOOTH)[1]
    error = (exact - smooth).pow(2).mean().sqrt() / smooth.pow(2).mean().sqrt()
    assert 1e-4 < error < 3e-2, error


@pytest.mark.parametrize("numerics", [SMOOTH, ORDER_FREE], ids=["smooth", "order_free"])
def test_images_do_not_see_each_other(numerics: Numerics) -> None:
    vision, together = make_ops(numerics), run(numerics)[1]
    weights = VisionWeights.from_tensors(make_tensors(torch.bfloat16), SIZES.num_hidden_layers)
    patches = make_patches(numerics.activation_dtype).split([rows * columns for rows, columns in GRIDS])
    alone = [
        vision.align(vision.encode(image, [grid], weights, SIZES), [grid], weights, SIZES)
        for image, grid in zip(patches, GRIDS, strict=True)
    ]
    tolerance = 1e-5 if numerics is SMOOTH else 0
    torch.testing.assert_close(torch.cat(alone), together, rtol=tolerance, atol=tolerance)


def test_feature_count_equals_placeholder_count() -> None:
    vision = make_ops(EXACT)
    weights = VisionWeights.from_tensors(make_tensors(torch.bfloat16), SIZES.num_hidden_layers)
    for height, width in ((13, 7), (1, 1), (40, 3), (5, 61)):
        image = torch.full((height, width, 3), 200, dtype=torch.uint8)
        patches, geometry = vision.patchify(image, SIZES)
        grid = (geometry.patch_rows, geometry.patch_columns)
        assert patches.shape == (geometry.num_patches, 3, 4, 4) and patches.dtype == torch.bfloat16
        features = vision.align(vision.encode(patches, [grid], weights, SIZES), [grid], weights, SIZES)
        assert features.shape == (geometry.span().count(TokenKind.IMAGE), TEXT_WIDTH)


def test_gradients_reach_every_parameter_and_the_patches() -> None:
    tensors = {name: value.requires_grad_() for name, value in make_tensors(torch.float32).items()}
    patches = make_patches(torch.float32).requires_grad_()
    vision, weights = make_ops(SMOOTH), VisionWeights.from_tensors(tensors, SIZES.num_hidden_layers)
    features = vision.align(vision.encode(patches, GRIDS, weights, SIZES), GRIDS, weights, SIZES)
    kinds = torch.tensor([TokenKind.START, *[TokenKind.IMAGE] * len(features), TokenKind.NEWLINE, TokenKind.END])
    rows = (torch.cumsum(kinds == TokenKind.IMAGE, 0) - 1).clamp(min=0)
    merged = vision.merge(torch.zeros(len(kinds), TEXT_WIDTH), kinds, rows, features, weights)
    (merged * torch.randn(merged.shape, generator=torch.Generator().manual_seed(1))).sum().backward()
    for name, tensor in (*tensors.items(), ("patches", patches)):
        assert tensor.grad is not None and tensor.grad.isfinite().all() and tensor.grad.abs().sum() > 0, name


def test_gradient_equals_finite_differences() -> None:
    vision, patches = make_ops(SMOOTH), make_patches(torch.float32)
    tensors = make_tensors(torch.float32)
    weight = tensors["vision.blocks.1.attn.wqkv.weight"].requires_grad_()
    weights = VisionWeights.from_tensors(tensors, SIZES.num_hidden_layers)

    def loss() -> torch.Tensor:
        tower = vision.encode(patches, GRIDS, weights, SIZES)
        return vision.align(tower, GRIDS, weights, SIZES).double().sin().sum()

    (gradient,) = torch.autograd.grad(loss(), weight)
    direction = gradient / gradient.norm()
    with torch.no_grad():
        weight.add_(direction, alpha=1e-2)
        above = loss()
        weight.sub_(direction, alpha=2e-2)
        below = loss()
    assert ((above - below) / 2e-2).item() == pytest.approx(gradient.norm().item(), rel=2e-2)


def test_merge_inside_a_chunk_and_without_images() -> None:
    vision = make_ops(EXACT)
    weights = VisionWeights.from_tensors(make_tensors(torch.bfloat16), SIZES.num_hidden_layers)
    embeddings = torch.randn(6, TEXT_WIDTH).to(torch.bfloat16)
    before, features = embeddings.clone(), torch.randn(4, TEXT_WIDTH).to(torch.bfloat16)
    kinds = torch.tensor([TokenKind[name] for name in ("IMAGE", "NEWLINE", "IMAGE", "END", "TEXT", "PAD")])
    out = vision.merge(embeddings, kinds, torch.tensor([2, -7, 3, 99, 0, 0]), features, weights)
    assert torch.equal(out[:2], torch.stack((features[2], weights.image_newline)))
    assert torch.equal(out[2:], torch.stack((features[3], weights.image_end, embeddings[4], embeddings[5])))
    assert torch.equal(embeddings, before), "operands stay as they are"
    text = torch.full((6,), int(TokenKind.TEXT))
    assert torch.equal(vision.merge(embeddings, text, text, features[:0], weights), embeddings)


@pytest.mark.parametrize(
    "image",
    [torch.zeros(4, 4, 3), torch.zeros(4, 4, dtype=torch.uint8), torch.zeros(4, 4, 4, dtype=torch.uint8),
     torch.zeros(0, 4, 3, dtype=torch.uint8)],
    ids=["float", "grey", "alpha", "empty"],
)  # fmt: skip
def test_images_of_another_form_are_refused(image: torch.Tensor) -> None:
    with pytest.raises(RequestError, match=r"expected torch.uint8 \[height, width, 3\] with pixels"):
        make_ops(EXACT).patchify(image, SIZES)


def test_weights_need_every_tensor() -> None:
    tensors = make_tensors(torch.bfloat16)
    del tensors["vision.blocks.2.mlp.w2.weight"]
    with pytest.raises(KeyError, match="vision.blocks.2.mlp.w2.weight"):
        VisionWeights.from_tensors(tensors, SIZES.num_hidden_layers)
