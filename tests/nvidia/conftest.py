"""A machine of compute capability 10.x made of doubles, and backends bound on it."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))  # `doubles`

from deepinfer.hooks import OpContext, hookimpl
from deepinfer.hooks.ops import RuntimeOps
from deepinfer.models.deepseek_v41.config import ModelConfig
from deepinfer.testing.subject import load_plugin_object
from deepinfer_nvidia.libraries import Libraries
from deepinfer_nvidia.machine import Chip, Machine
from deepinfer_nvidia.plugin import NvidiaPlugin

B200 = Chip("B200 (double)", 10, 0, 148, 192 << 30)
LIBRARIES = ("flash_mla", "deep_gemm", "deep_select", "tile_kernels")


class DoublesPlugin(NvidiaPlugin):
    """The NVIDIA backend over doubles: everything but the device itself."""

    @hookimpl
    def deepinfer_create_runtime(self, context: OpContext) -> RuntimeOps:
        return RuntimeOps(context)

    @hookimpl
    def deepinfer_create_communicator(self, context: OpContext) -> None:
        return None


def doubles() -> dict[str, object]:
    """{module the adapters import: double}; what has no double is missing."""
    found = {name: importlib.import_module(f"doubles.{name}") for name in LIBRARIES}
    return {**found, "deep_ep": None, "humming": None, "tilelang": None, "triton": None}


def open_doubles(chip: Chip = B200, **modules: object):
    """The backend, opened on a machine with every double; `modules` replaces some of them."""
    machine = Machine(chip, Libraries(doubles() | modules))
    return load_plugin_object(DoublesPlugin(machine), "nvidia", "cpu")


def kernel_shaped(**changes: object) -> ModelConfig:
    """`micro` in sizes that every library takes: 64 heads in 8 groups, 1,024 channels."""
    raw = ModelConfig.builtin("micro").raw
    text = raw["text_config"] | {"num_attention_heads": 64, "o_groups": 8, "hidden_size": 1024} | changes
    return ModelConfig.from_dict({**raw, "text_config": text})


@pytest.fixture(scope="session", name="open_doubles")
def _open_doubles():
    return open_doubles


@pytest.fixture(scope="session", name="kernel_shaped")
def _kernel_shaped():
    return kernel_shaped
