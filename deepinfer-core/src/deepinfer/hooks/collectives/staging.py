"""Tensors as a transport takes them: contiguous, on the host if the transport needs it, bytes where dtype is no matter.

Used by the collectives of this package. Transports know few dtypes (none knows 8-bit floats), so everything that only
moves values moves bytes.
"""

from __future__ import annotations

import torch


def as_bytes(x: torch.Tensor) -> torch.Tensor:
    """The memory of a contiguous tensor as uint8 [bytes], without a copy."""
    return x.reshape(-1).view(torch.uint8)


def outgoing(x: torch.Tensor, on_host: bool) -> torch.Tensor:
    """`x` contiguous and, if asked, on the host; x itself where it already is."""
    return (x.cpu() if on_host else x).contiguous()


def incoming(x: torch.Tensor, on_host: bool) -> torch.Tensor:
    """A buffer to receive x's values in: x itself where a transport can write to it, otherwise a new tensor."""
    if x.is_contiguous() and not (on_host and x.device.type != "cpu"):
        return x
    return torch.empty(x.shape, dtype=x.dtype, device="cpu" if on_host else x.device)


def deliver(x: torch.Tensor, received: torch.Tensor) -> None:
    """Write what `incoming` received into x, if that was another tensor."""
    if received is not x:
        x.copy_(received)
