"""DeepInfer's backend for Acme devices: the record core finds by entry point, and nothing else. Imports no torch."""

from __future__ import annotations

from deepinfer.hooks import Backend, Requires

backend = Backend(
    name="acme",
    api=(0, 1),
    device_type="acme",
    requires=Requires(torch=">=2.9"),
    probe="deepinfer_acme.probe:present",
    plugin="deepinfer_acme.plugin:AcmePlugin",
)
