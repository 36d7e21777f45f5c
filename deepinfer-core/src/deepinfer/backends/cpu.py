"""The `cpu` backend's record: core's own entry in `deepinfer.backends`, chosen when no device is present.

It has no probe, so it never competes with a backend that finds its device.
"""

from __future__ import annotations

from deepinfer.hooks import PLUGIN_API, Backend

backend = Backend(
    name="cpu",
    api=PLUGIN_API,
    device_type="cpu",
    plugin="deepinfer.backends.cpu_plugin:CpuPlugin",
    environment="deepinfer.backends.cpu_environment:environment",
)
