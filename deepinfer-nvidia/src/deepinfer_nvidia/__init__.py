"""DeepInfer's backend for NVIDIA GPUs: the record core finds by entry point. Imports neither torch nor CUDA."""

from __future__ import annotations

from deepinfer.hooks import Backend, Requires

backend = Backend(
    name="nvidia",
    api=(0, 1),
    device_type="cuda",
    requires=Requires(torch=">=2.11", check="deepinfer_nvidia.probe:problems"),
    probe="deepinfer_nvidia.probe:present",
    environment="deepinfer_nvidia.probe:environment",
    plugin="deepinfer_nvidia.plugin:NvidiaPlugin",
)
