"""Vision ops: pixels to patches, the image tower, the aligner, and images put into a sequence of embeddings.

Called by the model's image path. Token counts come from `reference.vision_geometry`, which needs no pixels and is no
op: every backend shares it. Decoding files (PNG, JPEG) is not done here: `patchify` takes pixels and does everything
after, the resizing included, so that one definition fixes every byte the tower sees.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from deepinfer.errors import RequestError
from deepinfer.hooks.api import OpGroup, op
from deepinfer.reference import vision as reference
from deepinfer.reference.vision import Grid, Rounding, VisionWeights
from deepinfer.reference.vision_geometry import ImageGeometry, VisionSizes, image_geometry


class VisionOps(OpGroup):
    """The image side. Images of one call, at least one, are concatenated row by row; `grids` are host integers.

    Numerics: exact rounds to bfloat16 after every product, norm, rope and activation, with sums in float32; smooth
    rounds nowhere and is differentiable from the patches on.
    """

    group = "vision"

    @property
    def _rounding(self) -> Rounding:
        return Rounding(self.numerics.activation_dtype, self.numerics.accumulate_dtype)

    @op(status="experimental", grain="block")
    def patchify(self, image: torch.Tensor, sizes: VisionSizes) -> tuple[torch.Tensor, ImageGeometry]:
        """Resize (bicubic, antialiased, exact bytes: reference.resize), centre on grey, normalize, cut into patches.

        image    [h, w, 3] uint8 RGB on any device
        returns  patches [P, 3, p, p] activation dtype on the image's device, row-major, and the geometry
        raises   RequestError for another shape or dtype, or an empty image
        """
        if image.dtype != torch.uint8 or image.dim() != 3 or image.shape[2] != 3 or 0 in image.shape:
            raise RequestError(
                f"image is {image.dtype} {list(image.shape)}, expected torch.uint8 [height, width, 3] with pixels; "
                "decode it to RGB first"
            )
        geometry = image_geometry(image.shape[1], image.shape[0], sizes)
        return reference.patchify(image, geometry, sizes.patch_size, self._rounding.activation), geometry

    @op(status="experimental", grain="layer")
    def encode(
        self, patches: torch.Tensor, grids: Sequence[Grid], weights: VisionWeights, sizes: VisionSizes
    ) -> torch.Tensor:
        """The vision transformer with its final norm. Attention goes through `attention.encoder`.

        patches  [P, 3, p, p] activation dtype, images one after another
        grids    (rows, columns) of patches of every image; their products sum to P
        returns  [P, D] activation dtype
        """
        return reference.encode(
            patches, grids, weights, sizes.num_attention_heads, sizes.rope_theta, self._rounding,
            self.ops.attention.encoder,
        )  # fmt: skip

    @op(status="experimental", grain="kernel")
    def downsample(self, x: torch.Tensor, grids: Sequence[Grid], ratio: int) -> torch.Tensor:
        """Join ratio x ratio neighbouring patches into one row, channel-major, zeros past the right and bottom edge.

        x        [P, D] activation dtype
        returns  [F, D * ratio^2] same dtype; F = sum over images of ceil(rows / ratio) * ceil(columns / ratio)
        """
        return reference.downsample(x, grids, ratio)

    @op(status="experimental", grain="block")
    def align(self, x: torch.Tensor, grids: Sequence[Grid], weights: VisionWeights, sizes: VisionSizes) -> torch.Tensor:
        """Features in the text model's width: `vision.downsample`, then a two-layer MLP with erf GELU.

        x        [P, D] activation dtype, from `encode`
        returns  [F, H] activation dtype, one row for every IMAGE position, row-major, images in order
        """
        joined = self.ops.vision.downsample(x, grids, sizes.downsample_ratio)
        return reference.align(joined, weights, self._rounding)

    @op(status="experimental", grain="kernel")
    def merge(
        self,
        embeddings: torch.Tensor,
        kinds: torch.Tensor,
        feature_rows: torch.Tensor,
        features: torch.Tensor,
        weights: VisionWeights,
    ) -> torch.Tensor:
        """Replace the embeddings of image positions: features, and the learned start, newline and end vectors.

        embeddings    [Q, H] activation dtype
        kinds         [Q] int64, TokenKind of every row
        feature_rows  [Q] int64, row of `features` where the kind is IMAGE (a chunk may begin inside an image);
                      ignored elsewhere
        features      [F, H] from `align`
        returns       [Q, H] a new tensor; rows of other kinds unchanged
        """
        return reference.merge(embeddings, kinds, feature_rows, features, weights)
