"""Writes a trained state as a checkpoint in the published format, which core's loader reads.

    python export.py --model v41-tiny-text --data FOLDER --state STATE.pt --tokenizer FOLDER --out CHECKPOINT

Dense weights become e4m3 with one power-of-two scale per 32 x 32 block, experts e2m1 with one per 32, Engram tables
e4m3 with one per 32; Engram tables get a shard of their own. The vision tower, which text training does not touch,
keeps the random values of core's test checkpoints.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
from collections.abc import Mapping
from pathlib import Path

import torch
from model_config import OVERRIDES, tiny_config
from model_weights import VISION, Weights

from deepinfer.hub.safetensors_index import INDEX_NAME
from deepinfer.hub.tensor_spec import BITS, TensorSpec, scale_name
from deepinfer.models.deepseek_v41.config import ModelConfig
from deepinfer.models.deepseek_v41.manifest import manifest
from deepinfer.models.deepseek_v41.random_weights import random_tensor
from deepinfer.reference import quant
from deepinfer.testing.checkpoint import plan_shards, write_json

QUANTIZERS = {
    "fp8_block32": quant.quantize_weight_fp8_block32,
    "fp8_row32": quant.quantize_rows_fp8,
    "mxfp4_row32": quant.quantize_weight_mxfp4,
}
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json")


def stored(weights: Weights, config: ModelConfig) -> dict[str, torch.Tensor]:
    """Every tensor of the checkpoint as it is stored, by published name."""
    specs = manifest(config)
    out: dict[str, torch.Tensor] = {}
    for name, values in weights.published():
        _store(out, name, values.cpu(), specs[name].kind)
    for name in [n for n in out if n.endswith(".gate.bias")]:
        out[f"{name}_vl"] = out[name].clone()  # image rows are routed as text is: nothing trained them
    for name, spec in specs.items():
        if name.startswith(VISION):
            out[name] = random_tensor(name, spec, seed=0)[0]
    return out


def _store(out: dict[str, torch.Tensor], name: str, values: torch.Tensor, kind: str) -> None:
    if kind in QUANTIZERS:
        out[name], out[scale_name(name)] = QUANTIZERS[kind](values)
    else:
        out[name] = values.float().clone() if kind == "f32" else values.to(torch.bfloat16)


def write(weights: Weights, config: ModelConfig, out: Path, shards: int = 2) -> Path:
    """Write config, shards and index; the tokenizer's files are copied by whoever has them."""
    specs, tensors = manifest(config), stored(weights, config)
    _check(specs, tensors)
    out.mkdir(parents=True, exist_ok=True)
    write_json(out / "config.json", config.raw)
    write_json(
        out / "generation_config.json", {"bos_token_id": config.bos_token_id, "eos_token_id": config.eos_token_id}
    )
    plan = _one_table_shard(plan_shards(specs, shards))
    for file_name, names in plan.items():
        write_shard(out / file_name, {name: specs[name] for name in names}, tensors)
    weight_map = {name: file_name for file_name, names in plan.items() for name in names}
    total = sum(spec.nbytes for spec in specs.values())
    write_json(out / INDEX_NAME, {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))})
    return out


def _one_table_shard(plan: Mapping[str, list[str]]) -> dict[str, list[str]]:
    """All Engram tables in one last shard."""
    groups = list(plan.values())
    tables = [group for group in groups if any(".engram.embed." in name for name in group)]
    rest = [group for group in groups if group not in tables]
    files = [*rest, *([[name for group in tables for name in group]] if tables else [])]
    return {f"model-{number:05d}-of-{len(files):05d}.safetensors": names for number, names in enumerate(files, 1)}


def _check(specs: Mapping[str, TensorSpec], tensors: Mapping[str, torch.Tensor]) -> None:
    if set(specs) != set(tensors):
        raise ValueError(f"found {sorted(set(tensors) ^ set(specs))[:5]}, expected exactly the manifest's tensors")
    for name, spec in specs.items():
        if tuple(tensors[name].shape) != spec.shape or tensors[name].itemsize * 8 != BITS[spec.dtype]:
            found = f"{tensors[name].dtype} {tuple(tensors[name].shape)}"
            raise ValueError(f"{name}: found {found}, expected {spec.dtype} {spec.shape}")


def write_shard(path: Path, specs: Mapping[str, TensorSpec], tensors: Mapping[str, torch.Tensor]) -> None:
    """One safetensors file; wide dtypes first, so that everything is aligned."""
    order = sorted(specs, key=lambda name: -BITS[specs[name].dtype])
    header, offset = {"__metadata__": {"format": "pt"}}, 0
    for name in order:
        end = offset + specs[name].nbytes
        header[name] = {"dtype": specs[name].dtype, "shape": list(specs[name].shape), "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for name in order:
            file.write(tensors[name].contiguous().view(-1).view(torch.uint8).numpy().tobytes())


def load_state(config: ModelConfig, state: Path) -> Weights:
    """The weights of a state file of `train.py` or `draft_train.py`."""
    banks = torch.load(state, weights_only=False, map_location="cpu")["banks"]
    specs = manifest(config)

    def zeros(name: str) -> torch.Tensor:
        shape = specs[name].shape
        return torch.zeros(*shape[:-1], shape[-1] * 2) if specs[name].kind == "mxfp4_row32" else torch.zeros(shape)

    weights = Weights.read(config, zeros)
    for key, bank in weights.banks.items():
        bank.copy_(banks[key])
    return weights


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=sorted(OVERRIDES), required=True)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--state", type=Path, required=True)
    parser.add_argument("--tokenizer", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--shards", type=int, default=2, help="files besides the one of the Engram tables")
    args = parser.parse_args()
    described = json.loads((args.data / "data.json").read_text(encoding="utf-8"))
    config = tiny_config(args.model, described["engram_compressed_vocab_size"])
    write(load_state(config, args.state), config, args.out, args.shards)
    for name in TOKENIZER_FILES if args.tokenizer else ():
        shutil.copyfile(args.tokenizer / name, args.out / name)
    print(f"wrote {args.out}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
