"""--dump-op and replay: what is stored of a call, that it survives, and how a replay judges it."""

from __future__ import annotations

import json
from dataclasses import dataclass

import numpy as np
import pytest
import torch

from deepinfer.errors import ConfigError
from deepinfer.hooks import Numerics, QuantTensor, StepInputs, provides
from deepinfer.hooks.ops import CacheOps, GemmOps
from deepinfer.reference.cache import Storage
from deepinfer.testing.cache_view import CacheView
from deepinfer.testing.capture import CallDumper, Target, has_nan
from deepinfer.testing.codec import CodecError, Decoder, Encoder
from deepinfer.testing.conformance import runs
from deepinfer.testing.conformance.runs import CALM, Checkpoints, Script
from deepinfer.testing.opinfo.context import Trio
from deepinfer.testing.replay import StoredCall, replay
from deepinfer.testing.replay_text import text
from deepinfer.testing.subject import load_groups, make_subject

from .kit_backends import HonestAttention, HonestGemm, PrivateCache, WrongNorm


def roundtrip(value, stand_in=None, packages=("deepinfer", "tests", "test_doors_replay"), device="cpu", made=None):
    encoder = Encoder(stand_in)
    form = json.loads(json.dumps(encoder.encode(value), allow_nan=False))
    tensors, starts = encoder.finish()
    names = frozenset({*packages, __name__.partition(".")[0]})
    return Decoder(tensors, starts, torch.device(device), names, made or (lambda kind, form: None), True).decode(form)


# --- the codec --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "value",
    [None, True, 3, 2.5, "text", (1, (2, None)), [1, "a"], {1: "a", "b": (2,)}, float("inf"), torch.bfloat16, -0.0],
)
def test_plain_values_come_back_as_they_were(value):
    back = roundtrip(value)
    assert back == value and type(back) is type(value)


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.int64, torch.bool, torch.uint8]
)
def test_tensors_of_every_dtype_come_back_bit_for_bit(dtype):
    value = torch.randint(0, 2, (3, 5)).to(dtype)
    back = roundtrip(value)
    assert back.dtype == dtype and torch.equal(back.view(torch.uint8), value.view(torch.uint8))


def test_strides_holes_and_shared_memory_survive():
    base = torch.arange(24.0).view(4, 6)
    part, turned, wide = base[1:3, ::2], base.T, torch.ones(1, 4).expand(3, 4)
    a, b, c, d = roundtrip((base, part, turned, wide))
    assert torch.equal(b, part) and b.stride() == part.stride()
    b.zero_()
    assert a[1, 0] == 0 and c[2, 1] == 0, "views of the same memory stay views of it"
    assert torch.equal(d, wide) and d.stride() == (0, 1)


def test_only_the_bytes_in_use_are_stored():
    encoder = Encoder()
    encoder.encode(torch.zeros(1_000_000)[500_000:500_010])
    tensors, _ = encoder.finish()
    assert sum(t.numel() for t in tensors.values()) < 100


def test_empty_tensors_and_host_arrays():
    empty, array = roundtrip((torch.zeros(0, 3), np.arange(4, dtype=np.int32)))
    assert empty.shape == (0, 3)
    assert isinstance(array, np.ndarray) and array.dtype == np.int32 and array.tolist() == [0, 1, 2, 3]


@dataclass(frozen=True, slots=True)
class Nested:
    inner: QuantTensor
    table: dict[int, torch.Tensor]


def test_nested_dataclasses_and_step_inputs_come_back():
    subject = make_subject(load_groups(name="any"))
    spec = subject.config.cache_spec(128, 6)
    args = (np.array([3]), np.array([4]), np.array([1]), np.array([[1]]), np.array([7]), spec)
    from deepinfer.hooks.ops.step_inputs import Truncation

    step = subject.ops.step_inputs.build(*args, Truncation()).encoder
    back, nested = roundtrip((step, Nested(QuantTensor(torch.ones(2)), {7: torch.zeros(1)})))
    assert isinstance(back, StepInputs) and torch.equal(back.positions, step.positions)
    assert back.spans == step.spans and back.entries.keys() == step.entries.keys()
    assert isinstance(nested.inner, QuantTensor) and nested.table[7].tolist() == [0.0]
    assert roundtrip(Numerics(order_free=True)) == Numerics(order_free=True)


def test_what_cannot_be_stored_or_read_is_named():
    with pytest.raises(CodecError, match="function cannot be stored"):
        roundtrip({"f": lambda: None})
    with pytest.raises(CodecError, match=r"holds a deepinfer.*QuantTensor; only classes of other, .* are known"):
        encoder = Encoder()
        form = encoder.encode(QuantTensor(torch.ones(1)))
        Decoder(*encoder.finish(), torch.device("cpu"), frozenset({"other", "x"}), lambda *a: None, True).decode(form)


# --- capturing --------------------------------------------------------------------------------------------------------


def test_a_target_is_an_op_and_maybe_a_number():
    assert Target.parse("gemm.linear") == Target("gemm.linear", None)
    assert Target.parse("gemm.linear:12") == Target("gemm.linear", 12)
    with pytest.raises(ConfigError, match="Did you mean gemm.linear?"):
        Target.parse("gemm.liner:1")
    for text_ in ("gemm.linear:", "gemm.linear:0", "gemm.linear:x"):
        with pytest.raises(ConfigError, match="expected NAME or NAME:n"):
            Target.parse(text_)


def bound(*classes, dumper, name="some"):
    return make_subject(load_groups(*classes, name=name), wrappers=(dumper,))


def test_the_nth_call_is_stored_with_operands_as_they_were(tmp_path):
    dumper = CallDumper("runtime.copy:2", tmp_path)
    ops = bound(dumper=dumper).ops
    for value in (1.0, 2.0, 3.0):
        ops.runtime.copy(torch.zeros(3), torch.full((3,), value))
    assert dumper.calls == 3 and dumper.written == tmp_path / "runtime.copy-call2.json"
    assert dumper.written.with_suffix(".safetensors").exists()
    call = StoredCall.read(dumper.written)
    subject = make_subject(load_groups(name="any"))
    (destination, source), named = call.operands(subject.ops, subject.context, frozenset({"deepinfer"}))
    assert destination.tolist() == [0.0] * 3 and source.tolist() == [2.0] * 3 and named == {}
    result, after = call.result(subject.ops, subject.context, frozenset({"deepinfer"}))
    assert result.tolist() == after[0][0].tolist() == [2.0] * 3


class Failing(HonestGemm):
    """The third call raises, or returns a NaN."""

    fault = "raise"

    @provides()
    def swiglu(self, gate_up, limit, row_weight=None):
        self._calls = getattr(self, "_calls", 0) + 1
        if self._calls == 3 and self.fault == "raise":
            gate_up.zero_()
            raise RuntimeError("kernel died")
        out = super().swiglu(gate_up, limit, row_weight)
        return out * torch.nan if self._calls == 3 else out


class ReturningNan(Failing):
    fault = "nan"


@pytest.mark.parametrize(("kind", "error"), [(Failing, "RuntimeError: kernel died"), (ReturningNan, None)])
def test_without_a_number_the_first_call_that_fails_is_stored(tmp_path, kind, error):
    dumper = CallDumper("gemm.swiglu", tmp_path)
    ops = bound(kind, dumper=dumper).ops
    for number in range(1, 5):
        try:
            ops.gemm.swiglu(torch.full((2, 8), float(number), dtype=torch.bfloat16), 10.0)
        except RuntimeError:
            assert number == 3
    call = StoredCall.read(dumper.written)
    assert call.head["call"] == 3 and call.head["error"] == error
    ops = make_subject(load_groups(name="any"))
    (gate_up, _), _ = call.operands(ops.ops, ops.context, frozenset({"deepinfer"}))
    assert gate_up.float().unique().tolist() == [3.0], "as it was before the call"
    assert dumper.outcome().startswith("stored in ")


def test_where_nothing_fails_nothing_is_written(tmp_path):
    dumper = CallDumper("gemm.swiglu", tmp_path)
    bound(HonestGemm, dumper=dumper).ops.gemm.swiglu(torch.zeros(1, 4, dtype=torch.bfloat16), 1.0)
    assert dumper.written is None and not list(tmp_path.iterdir())
    assert "none of 1 calls failed" in dumper.outcome()


def test_a_kernel_that_takes_the_process_down_leaves_its_operands(tmp_path):
    class Killer(HonestGemm):
        @provides()
        def swiglu(self, gate_up, limit, row_weight=None):
            raise SystemExit(1)  # what no `except Exception` catches

    dumper = CallDumper("gemm.swiglu:1", tmp_path)
    with pytest.raises(SystemExit):
        bound(Killer, dumper=dumper).ops.gemm.swiglu(torch.ones(1, 4, dtype=torch.bfloat16), 1.0)
    assert StoredCall.read(tmp_path / "gemm.swiglu-call1.json").head["op"] == "gemm.swiglu"


def test_nan_is_found_wherever_it_is():
    assert has_nan((torch.ones(1), {"x": [QuantTensor(torch.tensor([torch.nan]))]}))
    assert not has_nan((torch.tensor([torch.inf]), torch.ones(1, dtype=torch.int64), None))


# --- replaying --------------------------------------------------------------------------------------------------------


def stored(tmp_path, op, *classes, name="some", number=1):
    """Store a call of an op on the first sample of the kit that has rows; returns the file and the backend."""
    from deepinfer.testing.opinfo import op_infos

    dumper = CallDumper(f"{op}:{number}", tmp_path)
    loaded = load_groups(*classes, name=name)
    subject = make_subject(loaded, wrappers=(dumper,))
    ctx, info = Trio.of(subject).found, op_infos()[op]
    for sample in info.samples(ctx, quick=True):
        args = sample.fresh()
        info.function(ctx.ops)(*args)
    assert dumper.written is not None
    return dumper.written, loaded


@pytest.mark.parametrize(
    "op",
    ["gemm.linear", "gemm.grouped_linear", "gemm.quantize", "attention.rope", "attention.latent", "attention.select",
     "residual.site", "experts.moe", "engram.fetch", "cache.store_window", "cache.compress", "step_inputs.build",
     "sampling.draw"],
)  # fmt: skip
def test_a_call_of_core_replays_to_the_same_bits(tmp_path, op):
    file, loaded = stored(tmp_path, op, HonestAttention, name="some")
    done = replay(file, "reference", loaded)
    assert done.found.error is None and done.found.leaves.keys() == done.working.leaves.keys()
    assert done.ok, text(done)


def test_a_native_call_repeats_its_record_and_is_held_to_the_reference(tmp_path):
    file, loaded = stored(tmp_path, "gemm.rms_norm", WrongNorm, name="bad")
    done = replay(file, loaded=loaded)
    assert done.repeated() == "; equal to the record, bit for bit" and not done.ok
    said = text(done)
    assert "gemm.rms_norm v1, call 1, recorded from bad 0 (in-process) on cpu" in said
    assert "bad DIFFERS from the reference" in said and "allowed" in said
    honest = replay(file, "fine", load_groups(HonestGemm, name="fine"))
    assert honest.ok and "differs from the record in result" in honest.repeated()
    assert not replay(file, "reference", loaded).ok, "the record itself is wrong"


class Transposed(GemmOps):
    """Keeps weights the other way round, which only it can read."""

    LAYOUT = {"dense_weight": "columns_v1"}  # noqa: RUF012

    @provides(layouts=LAYOUT)
    def prepare_weight(self, weight):
        return Columns(self._dense(weight).float().T.contiguous())

    @provides(layouts=LAYOUT)
    def linear(self, x, weight, out_dtype=None):
        values = x.dequantize() if isinstance(x, QuantTensor) else x
        return (values.float() @ weight.columns).to(out_dtype or self.numerics.activation_dtype)

    @provides(layouts=LAYOUT)
    def block_diagonal_linear(self, x, weight):
        return self._quantize(torch.zeros(x.values.shape[0], weight.columns.shape[1]))


@dataclass
class Columns:
    columns: torch.Tensor


def test_prepared_weights_are_prepared_again_by_whoever_replays(tmp_path):
    file, loaded = stored(tmp_path, "gemm.linear", Transposed, name="turned")
    assert '"prepared"' in file.read_text()
    done = replay(file, loaded=loaded)
    assert done.ok and done.repeated().endswith("bit for bit"), text(done)


def test_caches_in_a_private_layout_are_read_by_the_reference_through_their_ops(tmp_path):
    class Odd(PrivateCache):
        """Storage of a class of its own."""

        @provides(layouts={"kv_cache": "planes_v1"})
        def allocate(self, spec, num_blocks, num_slots):
            cache = super().allocate(spec, num_blocks, num_slots)
            cache.storage.__class__ = OddStorage
            return cache

    file, loaded = stored(tmp_path, "cache.load_window", Odd, name="odd")
    head = json.loads(file.read_text())
    assert head["layout"] == "planes_v1" and head["operands"]["items"][0]["kind"] == "cache"
    done = replay(file, loaded=loaded)
    assert done.ok and done.repeated().endswith("bit for bit"), text(done)
    other = replay(file, "other", load_groups(_other_layout(), name="other"))
    assert "works on layout planes_v2, the record on planes_v1" in other.found.error and not other.ok


class OddStorage(Storage):
    """Not the class of core, so its contents cannot be taken for core's."""


def _other_layout():
    from .kit_backends import _everything_of

    return _everything_of(CacheOps, "planes_v2")


def test_a_view_of_a_cache_holds_what_reads_return(tmp_path):
    subject = make_subject(load_groups(name="any"))
    spec = subject.config.cache_spec(128, 6)
    cache = subject.ops.cache.allocate(spec, 3, 2)
    for rows in (*cache.storage.windows, *cache.storage.entries.values(), *cache.storage.index.values()):
        rows.store(torch.arange(5), torch.randn(5, rows.dim))
    view = CacheView.read(subject.ops, cache, torch.device("cpu"))
    back = CacheView.read(subject.ops, view.restore(subject.context), torch.device("cpu"))
    for kind in ("windows", "entries", "index"):
        for layer, values in getattr(view, kind).items():
            assert torch.equal(values.float(), getattr(back, kind)[layer].float())
    assert view.windows[0].abs().sum() > 0 and view.entries[2].abs().sum() > 0


def test_files_that_are_no_calls_are_refused(tmp_path):
    with pytest.raises(ConfigError, match="is no call that --dump-op stored"):
        StoredCall.read(tmp_path / "nothing.json")
    file, _ = stored(tmp_path, "gemm.quantize")
    head = json.loads(file.read_text()) | {"format": 99}
    file.write_text(json.dumps(head))
    with pytest.raises(ConfigError, match="layout 99, this version reads 1"):
        StoredCall.read(file)


def test_a_call_of_a_running_engine_is_stored_and_replays(tmp_path):
    dumper = CallDumper("attention.cached:9", tmp_path)
    loaded = load_groups(HonestAttention, HonestGemm, name="some")
    script, checkpoints = Script.make((5, 20), 3, 512, seed=0), Checkpoints()
    with runs.engine(checkpoints.path(CALM), loaded, wrappers=(dumper,)) as llm:
        runs.forced(llm, script)
    done = replay(dumper.written.with_suffix(".safetensors"), loaded=loaded)
    assert done.ok and done.repeated().endswith("bit for bit"), text(done)
