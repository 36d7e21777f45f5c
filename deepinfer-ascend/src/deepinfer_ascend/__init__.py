"""DeepInfer's backend for Ascend NPUs: the record core finds by entry point. Imports neither torch nor torch_npu."""

from __future__ import annotations

from deepinfer.hooks import Backend, Requires

backend = Backend(
    name="ascend",
    api=(0, 1),
    device_type="npu",
    requires=Requires(torch=">=2.9", check="deepinfer_ascend.probe:problems"),
    probe="deepinfer_ascend.probe:present",
    environment="deepinfer_ascend.probe:environment",
    plugin="deepinfer_ascend.plugin:AscendPlugin",
)
