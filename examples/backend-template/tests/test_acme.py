"""What conformance cannot know of this backend: when it refuses, and in which words."""

from __future__ import annotations

import torch

from deepinfer.hooks import SMOOTH


def reasons(ops, name):
    """Why op `name` is not served by this backend."""
    return [reason for refused in ops.binding(name).refused for reason in refused.reasons]


def test_without_a_compiler_core_serves_the_kernel(deepinfer_make_subject, monkeypatch):
    monkeypatch.setenv("CXX", "no-such-compiler")
    ops = deepinfer_make_subject().ops
    assert ops.binding("gemm.swiglu").kind == "reference"
    assert "no C++ compiler 'no-such-compiler' on the path" in reasons(ops, "gemm.swiglu")[0]


def test_smooth_numerics_are_left_to_core(deepinfer_make_subject):
    ops = deepinfer_make_subject(numerics=SMOOTH).ops
    assert ops.binding("cache.allocate").layout == "canonical"
    assert reasons(ops, "cache.allocate") == [
        "numerics.packed_cache=False, allowed True: acme_planar_v1 holds published bytes"
    ]


def test_a_cached_key_takes_its_published_bytes(deepinfer_subject):
    """528 a window key, 288 a compressed entry, 68 an index key."""
    spec = deepinfer_subject.config.cache_spec(block_size=128, backtracking=6)
    storage = deepinfer_subject.ops.cache.allocate(spec, num_blocks=2, num_slots=2).storage

    def size(plane):
        return plane.codes.shape[-1] + plane.scales.shape[-1]

    assert {size(plane) for plane in storage.windows} == {528}
    assert {size(plane) for plane in storage.entries.values()} == {288}
    assert {size(plane) for plane in storage.index.values()} == {68}
    assert all(memory.dtype in (torch.uint8, torch.float32) for memory in storage.by_slot())
