"""Writes a deterministic random checkpoint in exactly the published format, tokenizer included.

Behind `deepinfer make-checkpoint`, and the usual fixture of tests. The values come from
`models/deepseek_v41/random_weights.py`; this module arranges them in shards. It streams: memory stays at a few
megabytes whatever the size of the model. The index is written last, so an interrupted run leaves no valid checkpoint.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import torch

from deepinfer.errors import ConfigError
from deepinfer.hub.byte_tokenizer import BOS, EOS, PAD, build_byte_tokenizer
from deepinfer.hub.safetensors_index import INDEX_NAME
from deepinfer.hub.tensor_spec import BITS, SCALE, TensorSpec, scale_name
from deepinfer.models.deepseek_v41.config import ModelConfig
from deepinfer.models.deepseek_v41.manifest import manifest
from deepinfer.models.deepseek_v41.random_weights import random_chunks

SHARD_BYTES = 5 * 10**9
"""Size that shards are aimed at where their number is not given."""

Progress = Callable[[int, int], None]
"""Called with bytes written and bytes in total."""


def write_checkpoint(
    config: ModelConfig,
    out_dir: str | Path,
    seed: int = 0,
    shards: int | None = None,
    progress: Progress | None = None,
) -> Path:
    """Write config, tokenizer, shards and index to `out_dir` and return it.

    `shards` counts the files besides the Engram tables, which get one each; default: at least two, of about 5 GB.
    Equal config, seed and shards give equal bytes. Raises ConfigError where the directory holds files already, the disk
    is too small, or the tokenizer recipe cannot meet the configuration (vocabulary, image id, Engram classes).
    """
    out_dir = Path(out_dir)
    specs = manifest(config)
    total = sum(spec.nbytes for spec in specs.values())
    tokenizer = _tokenizer(config)
    _prepare(out_dir, total)
    write_json(out_dir / "config.json", config.raw)
    tokenizer.save(str(out_dir / "tokenizer.json"))
    write_json(out_dir / "tokenizer_config.json", _tokenizer_config(config))
    write_json(out_dir / "generation_config.json", _generation_config(config))
    plan = plan_shards(specs, shards)
    meter = _Meter(total, progress)
    for file_name, names in plan.items():
        _write_shard(out_dir / file_name, {name: specs[name] for name in names}, seed, meter)
    weight_map = {name: file_name for file_name, names in plan.items() for name in names}
    index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
    write_json(out_dir / INDEX_NAME, index)
    return out_dir


def plan_shards(specs: Mapping[str, TensorSpec], shards: int | None = None) -> dict[str, list[str]]:
    """{file name: tensor names}: `shards` files of about equal size, then one for each Engram table with its scales."""
    if shards is not None and shards < 1:
        raise ConfigError(f"shards: found {shards}, expected at least 1")
    tables = [name for name in specs if name.endswith(".engram.embed.weight")]
    apart = {name for table in tables for name in (table, scale_name(table))}
    rest = [name for name in specs if name not in apart]
    rest_bytes = sum(specs[name].nbytes for name in rest)
    groups: list[list[str]] = [[] for _ in range(shards or max(2, -(-rest_bytes // SHARD_BYTES)))]
    done = 0
    for name in rest:
        if specs[name].kind != SCALE:
            target = min(done * len(groups) // rest_bytes, len(groups) - 1)
        groups[target].append(name)  # scales follow their weight in the manifest and stay with it
        done += specs[name].nbytes
    files = [group for group in groups if group] + [[table, scale_name(table)] for table in tables]
    return {f"model-{number:05d}-of-{len(files):05d}.safetensors": names for number, names in enumerate(files, 1)}


def write_json(path: Path, value: Any) -> None:
    """Write JSON as checkpoints have it: two blanks of indentation, UTF-8, a newline at the end."""
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def _tokenizer(config: ModelConfig) -> Any:
    text = config.text
    special = (config.bos_token_id, config.eos_token_id, config.pad_token_id)
    if special != (0, 1, 2):
        raise ConfigError(f"bos_token_id, eos_token_id, pad_token_id: found {special}, expected (0, 1, 2)")
    return build_byte_tokenizer(text.vocab_size, text.engram_compressed_vocab_size, config.image_token_id)


def _prepare(out_dir: Path, total: int) -> None:
    try:
        out_dir.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"{out_dir}: cannot be created ({error.strerror or error})") from None
    if any(out_dir.iterdir()):
        raise ConfigError(f"{out_dir}: found files there, expected an empty or new directory")
    free = shutil.disk_usage(out_dir).free
    if free < total:
        raise ConfigError(f"{out_dir}: found {free / 1e9:.1f} GB free, expected {total / 1e9:.1f} GB for the weights")


def _tokenizer_config(config: ModelConfig) -> dict[str, Any]:
    return {
        "add_bos_token": True,
        "add_eos_token": False,
        "bos_token": BOS,
        "clean_up_tokenization_spaces": False,
        "eos_token": EOS,
        "model_max_length": config.text.max_position_embeddings,
        "pad_token": PAD,
        "tokenizer_class": "LlamaTokenizerFast",
    }


def _generation_config(config: ModelConfig) -> dict[str, Any]:
    return {"bos_token_id": config.bos_token_id, "eos_token_id": config.eos_token_id}


@dataclass(slots=True)
class _Meter:
    """Bytes written so far."""

    total: int
    report: Progress | None
    written: int = 0

    def add(self, count: int) -> None:
        self.written += count
        if self.report is not None:
            self.report(self.written, self.total)


def _write_shard(path: Path, specs: Mapping[str, TensorSpec], seed: int, meter: _Meter) -> None:
    offsets, size = _offsets(specs)
    header = _header(specs, offsets)
    partial = path.with_suffix(".partial")
    with partial.open("wb") as file:
        file.write(header)
        file.truncate(len(header) + size)
        for name, spec in specs.items():
            if spec.kind == SCALE:
                continue
            values, scales = len(header) + offsets[name], len(header) + offsets.get(scale_name(name), 0)
            for chunk in random_chunks(name, spec, seed):
                values = _put(file, values, chunk.values, meter)
                if chunk.scales is not None:
                    scales = _put(file, scales, chunk.scales, meter)
    partial.rename(path)


def _put(file: BinaryIO, position: int, tensor: torch.Tensor, meter: _Meter) -> int:
    """Write a tensor's bytes at a position; returns where the next chunk goes."""
    data = tensor.contiguous().view(-1).view(torch.uint8).numpy()
    file.seek(position)
    file.write(data.data)
    meter.add(data.nbytes)
    return position + data.nbytes


def _offsets(specs: Mapping[str, TensorSpec]) -> tuple[dict[str, int], int]:
    """Where each tensor's data begins, and the size of all; wide dtypes first, so that everything is aligned."""
    offsets, position = {}, 0
    for name in sorted(specs, key=lambda name: -BITS[specs[name].dtype]):
        offsets[name] = position
        position += specs[name].nbytes
    return offsets, position


def _header(specs: Mapping[str, TensorSpec], offsets: Mapping[str, int]) -> bytes:
    entries: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    for name, offset in offsets.items():
        spec = specs[name]
        end = offset + spec.nbytes
        entries[name] = {"dtype": spec.dtype, "shape": list(spec.shape), "data_offsets": [offset, end]}
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text
