"""Written checkpoints: exactly the published format, the same bytes every time, in little memory."""

from __future__ import annotations

import hashlib
import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from deepinfer.errors import ConfigError
from deepinfer.hub.safetensors import Checkpoint
from deepinfer.hub.tokenizer import Tokenizer
from deepinfer.hub.vocabulary import compress_vocabulary
from deepinfer.models.deepseek_v41.config import ModelConfig
from deepinfer.models.deepseek_v41.manifest import manifest
from deepinfer.models.deepseek_v41.random_weights import SyntheticCheckpoint
from deepinfer.testing.checkpoint import plan_shards, write_checkpoint


def small(**changes: object) -> ModelConfig:
    """A configuration of a few hundred kilobytes."""
    raw = dict(ModelConfig.builtin("tiny").raw)
    raw["text_config"] = {
        **raw["text_config"],
        "hidden_size": 64,
        "moe_intermediate_size": 32,
        "num_attention_heads": 2,
        "q_lora_rank": 32,
        "o_lora_rank": 32,
        "index_n_heads": 1,
        "n_routed_experts": 4,
        "dspark_n_routed_experts": 4,
        **changes,
    }
    return ModelConfig.from_dict(raw)


def digest(directory: Path) -> dict[str, str]:
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in sorted(directory.iterdir())}


def test_round_trip(tmp_path: Path) -> None:
    config = small()
    directory = write_checkpoint(config, tmp_path / "new" / "checkpoint", seed=3)
    assert ModelConfig.from_directory(directory) == config
    specs = manifest(config)
    generated = SyntheticCheckpoint(specs, seed=3)
    with Checkpoint.open(directory) as checkpoint:
        checkpoint.validate(specs)
        assert checkpoint.nbytes == sum(spec.nbytes for spec in specs.values())
        for name in specs:
            stored, expected = checkpoint.read(name), generated.read(name)
            assert stored.dtype == expected.dtype
            assert torch.equal(stored.view(torch.uint8), expected.view(torch.uint8)), name


def test_files(checkpoints: Callable[[str], Path]) -> None:
    directory = checkpoints("tiny")
    shards = [f"model-{number:05d}-of-00004.safetensors" for number in range(1, 5)]
    others = ["config.json", "generation_config.json", "model.safetensors.index.json", "tokenizer.json"]
    assert sorted(path.name for path in directory.iterdir()) == sorted([*shards, *others, "tokenizer_config.json"])
    index = json.loads((directory / "model.safetensors.index.json").read_text(encoding="utf-8"))
    tables = [[name for name, file in index["weight_map"].items() if file == shard] for shard in shards[2:]]
    assert tables == [[f"layers.{layer}.engram.embed.{part}" for part in ("scale", "weight")] for layer in (1, 4)]
    assert index["metadata"]["total_size"] == sum(
        spec.nbytes for spec in manifest(ModelConfig.builtin("tiny")).values()
    )
    assert json.loads((directory / "generation_config.json").read_text(encoding="utf-8"))["eos_token_id"] == 1


def test_same_seed_same_bytes(tmp_path: Path) -> None:
    config = small()
    first = digest(write_checkpoint(config, tmp_path / "a", seed=5))
    assert digest(write_checkpoint(config, tmp_path / "b", seed=5)) == first
    other = digest(write_checkpoint(config, tmp_path / "c", seed=6))
    assert {name for name in first if first[name] != other[name]} == {n for n in first if n.endswith(".safetensors")}


def test_bytes_do_not_depend_on_threads(tmp_path: Path) -> None:
    before, found = torch.get_num_threads(), []
    try:
        for threads in (1, 3):
            torch.set_num_threads(threads)
            found.append(digest(write_checkpoint(small(), tmp_path / str(threads))))
    finally:
        torch.set_num_threads(before)
    assert found[0] == found[1]


def test_number_of_shards(tmp_path: Path) -> None:
    config = small()
    for shards, files in ((1, 3), (5, 7)):
        directory = write_checkpoint(config, tmp_path / str(shards), shards=shards)
        assert len(list(directory.glob("*.safetensors"))) == files
        Checkpoint.open(directory).validate(manifest(config))
    with pytest.raises(ConfigError, match="shards: found 0"):
        plan_shards(manifest(config), 0)


def test_shards_of_a_large_model_are_of_even_size() -> None:
    specs = manifest(ModelConfig.builtin("full"))
    plan = plan_shards(specs)
    assert sorted(name for names in plan.values() for name in names) == sorted(specs)
    sizes = [sum(specs[name].nbytes for name in names) for names in plan.values()]
    assert all(3e9 < size < 7e9 for size in sizes[:-2])
    assert all(size > 100e9 for size in sizes[-2:])
    holder = {name: file for file, names in plan.items() for name in names}
    scales = [name for name, spec in specs.items() if spec.kind == "scale"]
    assert all(holder[name] == holder[name.removesuffix("scale") + "weight"] for name in scales)


def test_progress_ends_at_the_total(tmp_path: Path) -> None:
    calls: list[tuple[int, int]] = []
    write_checkpoint(small(), tmp_path / "x", progress=lambda done, total: calls.append((done, total)))
    assert calls[-1][0] == calls[-1][1]
    assert calls == sorted(calls)


def test_existing_files_are_not_overwritten(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine", encoding="utf-8")
    with pytest.raises(ConfigError, match="found files there, expected an empty or new directory"):
        write_checkpoint(small(), tmp_path)
    with pytest.raises(ConfigError, match="cannot be created"):
        write_checkpoint(small(), tmp_path / "notes.txt" / "x")
    assert [path.name for path in tmp_path.iterdir()] == ["notes.txt"]


def test_disk_space_is_checked_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = shutil.disk_usage(tmp_path)._replace(free=100_000)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)
    with pytest.raises(ConfigError, match=r"found 0\.0 GB free, expected 510\.3 GB for the weights"):
        write_checkpoint(ModelConfig.builtin("full"), tmp_path / "x")
    assert list((tmp_path / "x").iterdir()) == []


def test_interrupted_writing_leaves_no_checkpoint(tmp_path: Path) -> None:
    def stop(done: int, total: int) -> None:
        if done > total // 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_checkpoint(small(), tmp_path / "x", progress=stop)
    assert not (tmp_path / "x" / "model.safetensors.index.json").exists()


@pytest.mark.parametrize(("vocab_size", "classes", "image"), [(512, 473, 500), (2048, 1200, 8), (4096, 4057, 4000)])
def test_tokenizer_meets_the_configuration(tmp_path: Path, vocab_size: int, classes: int, image: int) -> None:
    raw = dict(small(vocab_size=vocab_size, engram_compressed_vocab_size=classes).raw)
    raw["image_token_id"] = image
    directory = write_checkpoint(ModelConfig.from_dict(raw), tmp_path / "x")
    tokenizer = Tokenizer(directory)
    assert tokenizer.vocab_size == vocab_size
    assert tokenizer.token_id("<｜deepseek_image｜>") == image
    assert compress_vocabulary(tokenizer)[1] == classes
    assert tokenizer.decode(tokenizer.encode("Any text: é 漢 🙂", add_bos=False)) == "Any text: é 漢 🙂"


@pytest.mark.parametrize(
    ("key", "value", "expected"),
    [
        ("engram_compressed_vocab_size", 474, "245 to 473"),
        ("engram_compressed_vocab_size", 244, "245 to 473"),
        ("vocab_size", 282, "at least 283"),
    ],
)
def test_configurations_no_tokenizer_can_meet(tmp_path: Path, key: str, value: int, expected: str) -> None:
    raw = dict(small().raw)
    raw["text_config"] = {**raw["text_config"], key: value, "dspark_noise_token_id": 9}
    raw["image_token_id"] = 270
    with pytest.raises(ConfigError, match=f"{key}: found {value}, expected.*{expected}"):
        write_checkpoint(ModelConfig.from_dict(raw), tmp_path / "x")
    assert not (tmp_path / "x").exists()


def test_image_id_must_be_free(tmp_path: Path) -> None:
    raw = {**small().raw, "image_token_id": 1}
    with pytest.raises(ConfigError, match="image_token_id: found 1"):
        write_checkpoint(ModelConfig.from_dict(raw), tmp_path / "x")


PEAK = """
import resource, sys, torch
from deepinfer.hub.safetensors import Checkpoint
def peak(): return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
before = peak()
checkpoint = Checkpoint.open(sys.argv[1])
tensors = [checkpoint.read(name) for name in checkpoint.names]
print(peak() - before, checkpoint.nbytes, sum(tensor.nbytes for tensor in tensors))
"""


@pytest.mark.slow
def test_peak_memory_of_writing_and_reading(tmp_path: Path) -> None:
    """Reading S bytes takes at most 1.2 S + 200 MB (measured: S and some); writing a few chunks, whatever the size."""
    config = small(hidden_size=512, num_attention_heads=8, moe_intermediate_size=512, n_routed_experts=32)
    write = (
        "import resource, sys; from deepinfer.models.deepseek_v41.config import ModelConfig\n"
        "from deepinfer.testing.checkpoint import write_checkpoint\n"
        "config = ModelConfig.load(sys.argv[1]); peak = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss\n"
        "before = peak(); write_checkpoint(config, sys.argv[2]); print((peak() - before) * 1024)\n"
    )
    (tmp_path / "config.json").write_text(json.dumps(config.raw), encoding="utf-8")

    def run(*args: str) -> list[int]:
        done = subprocess.run([sys.executable, "-c", *args], check=True, capture_output=True, text=True, timeout=300)
        return [int(word) for word in done.stdout.split()]

    (written,) = run(write, str(tmp_path / "config.json"), str(tmp_path / "out"))
    grown, stored, held = run(PEAK, str(tmp_path / "out"))
    assert stored > 140e6
    assert held == stored
    assert grown <= 1.2 * stored + 50e6
    assert written < 120e6
