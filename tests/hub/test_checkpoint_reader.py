"""Opening, validating and reading checkpoints: good ones give the right bytes, bad ones are refused before any read."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from deepinfer.errors import CheckpointError
from deepinfer.hub.safetensors import Checkpoint
from deepinfer.hub.safetensors_header import read_header
from deepinfer.models.deepseek_v41.config import ModelConfig
from deepinfer.models.deepseek_v41.manifest import manifest

Editor = Callable[[Path, Callable[[dict[str, Any]], None]], None]
IndexEditor = Callable[[Callable[[dict[str, str]], None]], None]
SHARD = "model-00001-of-00004.safetensors"
NORM = "layers.0.attn_norm.weight"


def refusal(directory: Path) -> str:
    """Message with which a checkpoint of the tiny model is refused."""
    with pytest.raises(CheckpointError) as caught:
        Checkpoint.open(directory).validate(manifest(ModelConfig.from_directory(directory)))
    return str(caught.value)


def replaced(path: Path, content: bytes) -> None:
    path.unlink()
    path.write_bytes(content)


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(-1).view(torch.uint8)


# Good checkpoints


def test_every_tensor_equals_the_safetensors_library(checkpoints: Callable[[str], Path]) -> None:
    directory = checkpoints("tiny")
    seen = 0
    with Checkpoint.open(directory) as checkpoint:
        for path in sorted(directory.glob("*.safetensors")):
            with safe_open(path, "pt") as file:
                for name in file.keys():  # noqa: SIM118 (not a dict)
                    expected = file.get_tensor(name)
                    found = checkpoint.read(name)
                    assert found.shape == expected.shape
                    assert torch.equal(as_bytes(found), as_bytes(expected)), name
                    seen += 1
        assert seen == len(checkpoint.names) == 1238


def test_dtypes_handed_out(checkpoints: Callable[[str], Path]) -> None:
    with Checkpoint.open(checkpoints("tiny")) as checkpoint:
        expected = {
            "layers.0.attn.wq_a.weight": torch.float8_e4m3fn,
            "layers.0.attn.wq_a.scale": torch.uint8,
            "layers.0.ffn.experts.0.w1.weight": torch.uint8,
            "embed.weight": torch.bfloat16,
            "layers.0.attn.attn_sink": torch.float32,
        }
        assert {name: checkpoint.read(name).dtype for name in expected} == expected
        info = checkpoint.info("layers.0.attn.wq_a.scale")
        assert (info.dtype, info.shape, info.nbytes) == ("F8_E8M0", (4, 8), 32)


@pytest.mark.parametrize("name", ["layers.1.engram.embed.weight", "layers.1.engram.embed.scale", "head.weight"])
@pytest.mark.parametrize(("start", "stop"), [(0, 1), (7, 300), (511, 512), (20, 20), (0, 512)])
def test_row_ranges_read_and_mapped(checkpoints: Callable[[str], Path], name: str, start: int, stop: int) -> None:
    with Checkpoint.open(checkpoints("tiny")) as checkpoint:
        whole = checkpoint.read(name)
        for part in (checkpoint.read_rows(name, start, stop), checkpoint.map_rows(name, start, stop)):
            assert part.dtype == whole.dtype
            assert part.shape == (stop - start, *whole.shape[1:])
            assert torch.equal(as_bytes(part), as_bytes(whole[start:stop]))


def test_mapped_rows_outlive_the_checkpoint(checkpoints: Callable[[str], Path]) -> None:
    name = "layers.4.engram.embed.weight"
    with Checkpoint.open(checkpoints("tiny")) as checkpoint:
        mapped, whole = checkpoint.map_rows(name), checkpoint.read(name)
    assert torch.equal(as_bytes(mapped), as_bytes(whole))


def test_row_ranges_outside_are_refused(checkpoints: Callable[[str], Path]) -> None:
    with Checkpoint.open(checkpoints("tiny")) as checkpoint:
        for start, stop in ((0, 513), (-1, 3), (4, 3)):
            with pytest.raises(CheckpointError, match=r"embed\.weight: found rows .* within \[0, 512\)"):
                checkpoint.read_rows("embed.weight", start, stop)
        with pytest.raises(CheckpointError, match="has no tensor 'nothing'"):
            checkpoint.read("nothing")


def test_read_into_given_memory(checkpoints: Callable[[str], Path]) -> None:
    with Checkpoint.open(checkpoints("tiny")) as checkpoint:
        both = torch.empty(2, *checkpoint.info("embed.weight").shape, dtype=torch.bfloat16)
        for slot, name in zip(both, ("embed.weight", "head.weight"), strict=True):
            assert checkpoint.read(name, out=slot).data_ptr() == slot.data_ptr()
        assert torch.equal(both[1], checkpoint.read("head.weight"))
        with pytest.raises(ValueError, match="out: found"):
            checkpoint.read("embed.weight", out=both)
        with pytest.raises(ValueError, match="out: found"):
            checkpoint.read("embed.weight", out=both[0].float())


def test_single_file_without_index(tmp_path: Path) -> None:
    tensors = {"a": torch.arange(6, dtype=torch.float32).view(2, 3), "b": torch.tensor(5, dtype=torch.int64)}
    save_file(tensors, tmp_path / "model.safetensors")
    with Checkpoint.open(tmp_path) as checkpoint:
        assert torch.equal(checkpoint.read("a"), tensors["a"])
        assert checkpoint.read("b").shape == ()
        assert checkpoint.read("b").item() == 5
        assert checkpoint.nbytes == 32


def test_prefix_is_dropped(copy: Path, edit_shard: Editor, edit_index: IndexEditor) -> None:
    def prefixed(table: dict[str, Any]) -> None:
        entries = list(table.items())
        table.clear()
        table.update({f"model.{name}": value for name, value in entries})

    for path in copy.glob("*.safetensors"):
        edit_shard(path, prefixed)
    edit_index(prefixed)
    checkpoint = Checkpoint.open(copy)
    checkpoint.validate(manifest(ModelConfig.builtin("tiny")))
    assert NORM in checkpoint.names


def test_data_at_odd_offsets(tmp_path: Path) -> None:
    """The format does not promise alignment; wide tensors must still be read and mapped right."""
    header = {
        "odd": {"dtype": "U8", "shape": [1], "data_offsets": [0, 1]},
        "wide": {"dtype": "F32", "shape": [2, 2], "data_offsets": [1, 17]},
    }
    text = json.dumps(header).encode()
    values = torch.tensor([[1.5, -2.0], [3.25, 4.0]])
    data = len(text).to_bytes(8, "little") + text + b"\x07" + values.numpy().tobytes()
    (tmp_path / "model.safetensors").write_bytes(data)
    with Checkpoint.open(tmp_path) as checkpoint:
        assert torch.equal(checkpoint.read("wide"), values)
        assert torch.equal(checkpoint.map_rows("wide", 1, 2).clone(), values[1:])


# WL01: shards or index missing


def test_missing_shard(copy: Path) -> None:
    (copy / SHARD).unlink()
    message = refusal(copy)
    assert "1 of 4 shards named by the index are missing" in message
    assert f"missing {SHARD}" in message
    assert "incomplete" in message


def test_missing_index(copy: Path) -> None:
    (copy / "model.safetensors.index.json").unlink()
    message = refusal(copy)
    assert "found 4 *.safetensors files and neither model.safetensors.index.json nor model.safetensors" in message
    assert "incomplete" in message


def test_renamed_shard(copy: Path) -> None:
    (copy / SHARD).rename(copy / "model-00001-of-00009.safetensors")
    message = refusal(copy)
    assert f"missing {SHARD}" in message
    assert "Files that the index does not name: model-00001-of-00009.safetensors" in message


def test_missing_directory(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="found no such directory"):
        Checkpoint.open(tmp_path / "none")


def test_shards_that_the_index_does_not_name_are_not_opened(copy: Path) -> None:
    (copy / "model-00001-of-00002.safetensors").write_bytes(b"left over from something else")
    Checkpoint.open(copy).validate(manifest(ModelConfig.builtin("tiny")))


# WL02: index and shards disagree


def test_index_names_the_wrong_shard(copy: Path, edit_index: IndexEditor) -> None:
    edit_index(lambda weight_map: weight_map.update({NORM: "model-00002-of-00004.safetensors"}))
    assert f"{NORM}: the index says model-00002-of-00004.safetensors, found in {SHARD}" in refusal(copy)


def test_index_lists_a_tensor_that_no_shard_has(copy: Path, edit_index: IndexEditor) -> None:
    edit_index(lambda weight_map: weight_map.update({"layers.0.bias": SHARD}))
    assert f"layers.0.bias: the index says {SHARD}, but no shard has it" in refusal(copy)


def test_shard_has_a_tensor_that_the_index_lacks(copy: Path, edit_index: IndexEditor) -> None:
    edit_index(lambda weight_map: weight_map.pop(NORM))
    assert f"{NORM}: found in {SHARD}, but the index does not list it" in refusal(copy)


def test_tensor_in_two_shards(copy: Path, edit_shard: Editor) -> None:
    edit_shard(copy / "model-00002-of-00004.safetensors", lambda tensors: tensors.update({NORM: ("BF16", [0], b"")}))
    assert f"{NORM}: found twice, in {SHARD} and in model-00002-of-00004.safetensors" in refusal(copy)


def test_both_spellings_of_one_name(copy: Path, edit_shard: Editor, edit_index: IndexEditor) -> None:
    edit_shard(copy / SHARD, lambda tensors: tensors.update({f"model.{NORM}": tensors[NORM]}))
    edit_index(lambda weight_map: weight_map.update({f"model.{NORM}": SHARD}))
    message = refusal(copy)
    assert f"{NORM}: found twice" in message
    assert "the index has it with and without the prefix 'model.'" in message


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"", "damaged index"),
        (b"{}", "damaged index"),
        (b'{"weight_map": []}', "damaged index"),
        (b'{"weight_map": {}}', "damaged index"),
        (b'{"weight_map": {"a": 3}}', "damaged index"),
        (b'{"weight_map": {"a": "x.safetensors", "a": "y.safetensors"}}', "given twice"),
        (b'{"weight_map": {"a": "../x.safetensors"}}', "expected a file name inside the directory"),
    ],
)
def test_damaged_index(copy: Path, content: bytes, reason: str) -> None:
    replaced(copy / "model.safetensors.index.json", content)
    assert reason in refusal(copy)


# Damaged shards


@pytest.mark.parametrize("cut", [1, 128, 10_000_000])
def test_truncated_shard(copy: Path, cut: int) -> None:
    content = (copy / SHARD).read_bytes()
    replaced(copy / SHARD, content[:-cut])
    message = refusal(copy)
    assert (
        f"{SHARD}: truncated: the header describes {len(content)} bytes, the file has {len(content) - cut}" in message
    )


def test_all_damaged_shards_are_listed(copy: Path) -> None:
    for path in copy.glob("*.safetensors"):
        replaced(path, path.read_bytes()[:-1])
    assert refusal(copy).count("truncated") == 4


HEADER = b'{"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}}'


def shard_of(header: bytes, data: bytes = bytes(8), length: int | None = None) -> bytes:
    return (len(header) if length is None else length).to_bytes(8, "little") + header + data


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"", "not a safetensors file"),
        (b"\x01\x00", "not a safetensors file"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 7\n", "not a safetensors file"),
        (shard_of(HEADER, length=2**40), "not a safetensors file"),
        (shard_of(HEADER, b"", length=1000), "truncated: the header alone has 1008 bytes"),
        (shard_of(b"{]" + HEADER[2:]), "damaged header"),
        (shard_of(b"[" * 5000), "damaged header"),
        (shard_of(b'"text"'), "found a str, expected an object"),
        (shard_of(HEADER.replace(b'"shape":[2],', b"")), "a: found header entry"),
        (shard_of(HEADER.replace(b"[2]", b"[-2]")), "a: found header entry"),
        (shard_of(HEADER.replace(b"[2]", b"[2.0]")), "a: found header entry"),
        (shard_of(HEADER.replace(b"[2]", b"[true]")), "a: found header entry"),
        (shard_of(HEADER.replace(b"[0,8]", b"[0]")), "a: found header entry"),
        (shard_of(HEADER.replace(b"F32", b"F33")), "a: found dtype 'F33'"),
        (shard_of(HEADER.replace(b"[2]", b"[3]")), r"a: found 8 bytes in data_offsets \[0, 8\], expected 12"),
        (shard_of(HEADER.replace(b"[0,8]", b"[4,12]"), bytes(12)), "a: found data at offset 4, expected 0"),
        (shard_of(HEADER.replace(b"[0,8]", b"[8,0]")), "a: found -8 bytes"),
        (shard_of(HEADER[:-1] + b"," + HEADER[1:]), "'a' is given twice"),
        (shard_of(HEADER, bytes(9)), "data that no tensor owns"),
        (shard_of(HEADER, bytes(7)), "truncated"),
    ],
)
def test_damaged_header(tmp_path: Path, content: bytes, reason: str) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes(content)
    with pytest.raises(CheckpointError, match=reason) as caught:
        Checkpoint.open(tmp_path)
    assert "model.safetensors" in str(caught.value)


def test_overlapping_tensors(tmp_path: Path) -> None:
    second = b',"b":{"dtype":"F32","shape":[1],"data_offsets":[4,8]}}'
    (tmp_path / "x.safetensors").write_bytes(shard_of(HEADER[:-1] + second))
    with pytest.raises(CheckpointError, match="b: found data at offset 4, expected 8"):
        read_header(tmp_path / "x.safetensors")


def test_file_that_shrinks_while_it_is_read(copy: Path) -> None:
    checkpoint = Checkpoint.open(copy)
    info = checkpoint.info("layers.1.engram.embed.weight")
    content = info.file.read_bytes()
    replaced(info.file, content[: info.start + 10])
    with pytest.raises(CheckpointError, match="became shorter while it was read"):
        checkpoint.read("layers.1.engram.embed.weight")


# WL03: tensors without elements, scalars, metadata


def test_empty_and_scalar_tensors_are_named_not_fatal(copy: Path, edit_shard: Editor, edit_index: IndexEditor) -> None:
    extra = {"unused.empty": ("F32", [0, 8], b""), "unused.scalar": ("F32", [], b"\0\0\x80?")}
    edit_shard(copy / SHARD, lambda tensors: tensors.update(extra))
    edit_index(lambda weight_map: weight_map.update(dict.fromkeys(extra, SHARD)))
    with Checkpoint.open(copy) as checkpoint:
        assert checkpoint.read("unused.empty").shape == (0, 8)
        assert checkpoint.map_rows("unused.empty").shape == (0, 8)
        assert checkpoint.read_rows("unused.empty", 0, 0).shape == (0, 8)
        assert checkpoint.read("unused.scalar").item() == 1.0
        with pytest.raises(CheckpointError, match="has no rows"):
            checkpoint.read_rows("unused.scalar", 0, 0)
    message = refusal(copy)
    assert f"{SHARD}: unused.empty: found F32 [0, 8], expected no such tensor" in message
    assert f"{SHARD}: unused.scalar: found F32 [], expected no such tensor" in message


def test_metadata_alone_is_no_tensor(copy: Path, edit_shard: Editor) -> None:
    edit_shard(copy / SHARD, lambda tensors: None)  # the editor writes other metadata than the product
    Checkpoint.open(copy).validate(manifest(ModelConfig.builtin("tiny")))


# WL04: wrong dtype or shape


@pytest.mark.parametrize(
    ("name", "entry", "found", "expected"),
    [
        ("layers.0.attn.wq_a.scale", ("F32", [4, 8], bytes(128)), "F32 [4, 8]", "F8_E8M0 [4, 8]"),
        ("layers.0.attn.wq_a.scale", ("F8_E8M0", [1, 2], bytes(2)), "F8_E8M0 [1, 2]", "F8_E8M0 [4, 8]"),
        ("layers.0.hc_attn_base", ("BF16", [24], bytes(48)), "BF16 [24]", "F32 [24]"),
        ("layers.0.ffn.experts.3.w1.weight", ("I8", [120, 128], bytes(15360)), "I8 [120, 128]", "I8 [128, 128]"),
        ("layers.0.ffn.experts.3.w1.weight", ("U8", [128, 128], bytes(16384)), "U8 [128, 128]", "I8 [128, 128]"),
        ("layers.0.attn.attn_sink", ("F32", [8, 1], bytes(32)), "F32 [8, 1]", "F32 [8]"),
    ],
)
def test_wrong_dtype_or_shape(
    copy: Path, edit_shard: Editor, name: str, entry: tuple[str, list[int], bytes], found: str, expected: str
) -> None:
    edit_shard(copy / SHARD, lambda tensors: tensors.update({name: entry}))
    message = refusal(copy)
    assert "0 missing, 0 unexpected, 1 of wrong dtype or shape" in message
    assert f"{SHARD}: {name}: found {found}, expected {expected}" in message


def drop(edit_shard: Editor, edit_index: IndexEditor, copy: Path, *names: str) -> None:
    for path in copy.glob("*.safetensors"):
        edit_shard(path, lambda tensors: [tensors.pop(name, None) for name in names])
    edit_index(lambda weight_map: [weight_map.pop(name) for name in names])


def test_missing_expert(copy: Path, edit_shard: Editor, edit_index: IndexEditor) -> None:
    parts = [f"{matrix}.{part}" for matrix in ("w1", "w2", "w3") for part in ("weight", "scale")]
    drop(edit_shard, edit_index, copy, *(f"layers.2.ffn.experts.5.{part}" for part in parts))
    message = refusal(copy)
    assert "layers.2.ffn.experts: 1 of 16 experts are incomplete" in message
    assert f"expert 5 lacks {', '.join(parts)}" in message


def test_missing_part_of_an_expert(copy: Path, edit_shard: Editor, edit_index: IndexEditor) -> None:
    drop(edit_shard, edit_index, copy, "mtp.1.ffn.experts.7.w3.scale")
    assert "mtp.1.ffn.experts: 1 of 8 experts are incomplete; expert 7 lacks w3.scale" in refusal(copy)


def test_renamed_tensor_is_missing_and_unexpected(copy: Path, edit_shard: Editor, edit_index: IndexEditor) -> None:
    old, new = "mtp.1.markov_head.embed.weight", "mtp.1.markov.embed.weight"

    def rename(table: dict[str, Any]) -> None:
        if old in table:
            table[new] = table.pop(old)

    for path in copy.glob("*.safetensors"):
        edit_shard(path, rename)
    edit_index(rename)
    message = refusal(copy)
    assert "1 missing, 1 unexpected" in message
    assert f"{old}: missing, expected BF16 [512, 32]" in message
    assert f"{new}: found BF16 [512, 32], expected no such tensor" in message


def test_norm_that_should_be_folded(copy: Path, edit_shard: Editor, edit_index: IndexEditor) -> None:
    name = "layers.0.hc_attn_norm.weight"
    edit_shard(copy / SHARD, lambda tensors: tensors.update({name: ("BF16", [1024], bytes(2048))}))
    edit_index(lambda weight_map: weight_map.update({name: SHARD}))
    assert "this norm is folded into hc_*_fn" in refusal(copy)


def test_long_lists_are_cut(copy: Path) -> None:
    other = manifest(ModelConfig.builtin("full"))
    with pytest.raises(CheckpointError) as caught:
        Checkpoint.open(copy).validate(other)
    lines = str(caught.value).splitlines()
    assert len(lines) == 22
    assert lines[-1].strip().startswith("... and ")
