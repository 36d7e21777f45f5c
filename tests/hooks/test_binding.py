"""Which implementation serves an op: order, refusals, overrides, layouts, filters, whole groups, broken contracts."""

from __future__ import annotations

import functools

import pytest

from deepinfer.errors import BackendError, OpBindingError
from deepinfer.hooks import CANONICAL, OpGroup, UnsupportedError, op, provides
from deepinfer.hooks.bind import bind

ACME = "acme 0.4.1 (deepinfer-acme)"


@pytest.fixture
def acme(small):
    """A provider class with one native op."""

    class AcmeMath(small.math):
        @provides()
        def square(self, x):
            return ("acme", x)

    return AcmeMath


def served(table) -> dict[str, str]:
    return {binding.spec.name: binding.provider.name for binding in table.bindings}


def test_core_serves_everything_alone(small):
    ops = small.bind()
    assert set(served(ops).values()) == {"reference"}
    assert ops.math.twice(3.0, ops.math.prepare(2.0)) == 12.0
    assert {b.spec.method: b.kind for b in ops.bindings if b.spec.group == "math"} == {
        "prepare": "reference", "linear": "reference", "twice": "decomposed", "square": "reference",
    }  # fmt: skip


def test_a_native_op_is_bound_and_the_rest_is_core(small, acme):
    ops = small.bind(small.offer(acme))
    assert ops.math.square(3) == ("acme", 3)
    binding = ops.binding("math.square")
    assert (str(binding.provider), binding.kind, binding.refused) == (ACME, "native", ())
    assert binding.implementation.endswith("AcmeMath.square")
    assert ops.binding("math.linear").refused[0].reasons == ("does not implement it",)


def test_packs_come_before_the_backend_and_partial_overrides_compose(small, acme):
    class PackMath(small.math):
        @provides()
        def square(self, x):
            return ("pack", x)

    class BackendMath(acme):
        @provides(layouts={"dense_weight": CANONICAL})
        def linear(self, x, weight, bias=0.0):
            return ("acme", x)

    ops = small.bind(small.offer(PackMath, name="pack"), small.offer(BackendMath))
    assert ops.math.square(1) == ("pack", 1)
    assert ops.math.linear(1, None) == ("acme", 1)
    assert served(ops)["math.prepare"] == "reference"


def test_composed_bodies_reach_native_parts_through_the_table(small):
    class AcmeMath(small.math):
        @provides(layouts={"dense_weight": CANONICAL})
        def linear(self, x, weight, bias=0.0):
            return x + 100

    ops = small.bind(small.offer(AcmeMath))
    assert ops.math.twice(1, None) == 201


def test_refusal_reasons_are_all_kept_in_order(small, acme):
    class Picky(acme):
        def refuse(self, op, traits):
            return ["heads=48, allowed 64 or 128", "kv_cache layout needs block_size=64, found 128"]

    binding = small.bind(small.offer(Picky, name="pack"), small.offer(Picky)).binding("math.square")
    assert binding.explain() == (
        "math.square v1 -> core reference\n"
        "  pack 0.4.1 (deepinfer-pack): heads=48, allowed 64 or 128; kv_cache layout needs block_size=64, found 128\n"
        f"  {ACME}: heads=48, allowed 64 or 128; kv_cache layout needs block_size=64, found 128"
    )


def test_refuse_is_asked_before_choosing_with_name_and_traits(small, acme):
    asked = []

    class Asked(acme):
        def refuse(self, op, traits):
            asked.append((op, traits))
            return []

    small.bind(small.offer(Asked))
    assert asked == [("math.square", None)]


@pytest.mark.parametrize("answer", ["no", None, [1]])
def test_refuse_must_return_a_list_of_reasons(small, acme, answer):
    class Odd(acme):
        def refuse(self, op, traits):
            return answer

    with pytest.raises(BackendError, match="expected a list of reasons"):
        small.bind(small.offer(Odd))


def test_a_raising_refuse_is_an_error(small, acme):
    class Odd(acme):
        def refuse(self, op, traits):
            raise ZeroDivisionError("oops")

    with pytest.raises(BackendError, match=r"refuse\('math.square'\) failed: ZeroDivisionError: oops") as caught:
        small.bind(small.offer(Odd))
    assert isinstance(caught.value.__cause__, ZeroDivisionError)


class TestContracts:
    """Mistakes of a plugin's author stop the start, all of them listed."""

    def problem(self, small, klass) -> str:
        with pytest.raises(OpBindingError) as caught:
            small.bind(small.offer(klass))
        title, *lines = str(caught.value).splitlines()
        assert title == f"{ACME}: {klass.__qualname__} breaks the contract MathOps:"
        return "\n".join(line.strip() for line in lines)

    @pytest.mark.parametrize(
        ("parameters", "text"),
        [
            ("x, w, bias=0.0", "(self, x, w, bias=0.0)"),
            ("weight, x, bias=0.0", "(self, weight, x, bias=0.0)"),
            ("x, weight, bias=0.0, extra=None", "(self, x, weight, bias=0.0, extra=None)"),
            ("x, weight", "(self, x, weight)"),
            ("x, weight, bias", "(self, x, weight, bias)"),
            ("x, weight, bias=1.0", "(self, x, weight, bias=1.0)"),
            ("x, weight, *, bias=0.0", "(self, x, weight, *, bias=0.0)"),
            ("x, weight, /, bias=0.0", "(self, x, weight, /, bias=0.0)"),
            ("*args", "(self, *args)"),
        ],
    )
    def test_wrong_signature(self, small, parameters, text):
        scope = {}
        exec(f"def linear(self, {parameters}): return None", scope)
        klass = type("AcmeMath", (small.math,), {"linear": provides()(scope["linear"])})
        assert self.problem(small, klass) == (
            f"math.linear: parameters are {text}, the contract has (self, x, weight, bias=0.0)"
        )

    def test_decorated_methods_are_judged_by_what_they_wrap(self, small):
        def passing(function):
            @functools.wraps(function)
            def inner(*args, **kwargs):
                return function(*args, **kwargs)

            return inner

        def dropping(function):
            @functools.wraps(function)
            def inner(self, x):
                return function(self, x, None)

            return inner

        def make(decorator):
            class AcmeMath(small.math):
                @decorator
                @provides(layouts={"dense_weight": CANONICAL})
                def linear(self, x, weight, bias=0.0):
                    return "decorated"

            return AcmeMath

        assert small.bind(small.offer(make(passing))).math.linear(1, 2) == "decorated"
        assert self.problem(small, make(dropping)) == (
            "math.linear: its decorator does not pass (self, x, weight, bias=0.0) on: too many positional arguments"
        )

    def test_unknown_version(self, small):
        class AcmeMath(small.math):
            @provides(version=2)
            def square(self, x):
                return x

        assert self.problem(small, AcmeMath) == "math.square: provides version 2; this core knows version 1"

    def test_misspelled_method(self, small):
        class AcmeMath(small.math):
            @provides()
            def sqare(self, x):
                return x

            limit = 3  # a constant is no method

        assert self.problem(small, AcmeMath) == (
            "sqare is no op of group math. Did you mean square? Helpers start with an underscore."
        )

    def test_misspelled_method_in_a_shared_base(self, small):
        class Mixin:
            def liner(self, x):
                return x

        class AcmeMath(Mixin, small.math):
            pass

        assert "liner is no op of group math. Did you mean linear?" in self.problem(small, AcmeMath)

    def test_missing_provides(self, small):
        class AcmeMath(small.math):
            def square(self, x):
                return x

        assert self.problem(small, AcmeMath) == "math.square: carries no @provides(version=1)"

    def test_layout_of_an_op_without_layout(self, small):
        class AcmeMath(small.math):
            @provides(layouts={"kv_cache": "acme_paged"})
            def square(self, x):
                return x

        assert self.problem(small, AcmeMath) == (
            "math.square: declares a layout for 'kv_cache'; layout tags of the op: none"
        )

    def test_callables_that_are_no_methods(self, small):
        class AcmeMath(small.math):
            square = functools.partial(lambda x: x)
            linear = staticmethod(lambda x, weight, bias=0.0: x)

        assert self.problem(small, AcmeMath) == (
            "math.linear: is a staticmethod; wrap it in a plain method\n"
            "math.square: is a partial; wrap it in a plain method"
        )

    def test_an_op_set_on_the_object(self, small):
        class AcmeMath(small.math):
            def __init__(self, context):
                super().__init__(context)
                self.square = lambda x: x

        assert self.problem(small, AcmeMath) == (
            "math.square: set as an attribute of the object, so binding does not see it; write a plain method"
        )

    def test_all_mistakes_at_once(self, small):
        class AcmeMath(small.math):
            def square(self, x):
                return x

            @provides(version=7)
            def prepare(self, weights):
                return weights

        assert self.problem(small, AcmeMath).splitlines() == [
            "math.prepare: provides version 7; this core knows version 1",
            "math.prepare: parameters are (self, weights), the contract has (self, w)",
            "math.square: carries no @provides(version=1)",
        ]

    @pytest.mark.parametrize(
        ("returned", "text"),
        [(3, "a int"), ("class", "the class AcmeMath (forgot the call?)")],
    )
    def test_a_factory_returns_an_object_of_the_contract(self, small, acme, returned, text):
        offer = small.offer()
        offer.factories["math"] = lambda context: acme if returned == "class" else returned
        with pytest.raises(BackendError) as caught:
            small.bind(offer)
        assert str(caught.value).replace(acme.__qualname__, "AcmeMath") == (
            f"{ACME}: deepinfer_create_math returned {text}, "
            "expected an object of a class derived from MathOps, or None"
        )


def test_a_factory_may_have_nothing_to_offer(small):
    offer = small.offer()
    offer.factories["math"] = lambda context: None
    assert set(served(small.bind(offer)).values()) == {"reference"}


def test_a_raising_factory_names_its_provider(small):
    offer = small.offer()
    offer.factories["math"] = lambda context: 1 / 0
    with pytest.raises(BackendError, match="deepinfer_create_math failed: ZeroDivisionError") as caught:
        small.bind(offer)
    assert isinstance(caught.value.__cause__, ZeroDivisionError)


def test_a_factorys_own_error_passes_with_a_note(small):
    def refuse(context):
        raise UnsupportedError("needs firmware 7, found 6")

    offer = small.offer()
    offer.factories["math"] = refuse
    with pytest.raises(UnsupportedError) as caught:
        small.bind(offer)
    assert str(caught.value) == "needs firmware 7, found 6"
    assert caught.value.__notes__ == [f"raised by {ACME} in deepinfer_create_math"]


class TestOverrides:
    def test_reference_means_core(self, small, acme):
        ops = small.bind(small.offer(acme), overrides=["math.*=reference"])
        assert set(served(ops).values()) == {"reference"}
        refused = {r.reasons for b in ops.bindings for r in b.refused if r.implements}
        assert refused == {("override math.*=reference",)}

    def test_the_last_match_wins_and_commas_separate(self, small, acme):
        ops = small.bind(small.offer(acme), overrides=["math.square=reference, math.sq*=acme"])
        assert served(ops)["math.square"] == "acme"
        ops = small.bind(small.offer(acme), overrides=["math.sq*=acme", "math.square=reference"])
        assert served(ops)["math.square"] == "reference"

    def test_a_provider_is_preferred_over_more_preferred_ones(self, small, acme):
        offers = small.offer(acme, name="pack"), small.offer(acme)
        assert served(small.bind(*offers))["math.square"] == "pack"
        assert served(small.bind(*offers, overrides=["math.*=acme"]))["math.square"] == "acme"

    @pytest.mark.parametrize(
        ("override", "text"),
        [
            ("math.sqare=acme", "op override 'math.sqare=acme': 'math.sqare' matches no op. Did you mean math.square?"),
            ("meth.*=acme", "op override 'meth.*=acme': 'meth.*' matches no op. Ops of group math: math.prepare, "
             "math.linear, math.twice, math.square"),
            ("zzz=acme", "op override 'zzz=acme': 'zzz' matches no op. Groups: math, runtime"),
            ("math.*=acne", "op override 'math.*=acne': no provider 'acne' is loaded. Providers: acme, reference. "
             "Did you mean acme?"),
            ("math.*", "op override 'math.*': expected PATTERN=PROVIDER, e.g. 'attention.*=reference'"),
            ("math.linear=acme", "op overrides cannot be followed:\n  math.linear (math.linear=acme): acme does not "
             "implement it"),
            ("run*=acme", "op override run*=acme: acme implements no op that matches"),
        ],
    )  # fmt: skip
    def test_overrides_that_cannot_be_followed(self, small, acme, override, text):
        with pytest.raises(OpBindingError) as caught:
            small.bind(small.offer(acme), overrides=[override])
        assert str(caught.value) == text

    def test_a_named_provider_that_refuses_is_an_error(self, small, acme):
        class Picky(acme):
            def refuse(self, op, traits):
                return ["heads=48, allowed 64"]

        with pytest.raises(OpBindingError) as caught:
            small.bind(small.offer(Picky), overrides=["math.*=acme"])
        assert str(caught.value) == (
            "op overrides cannot be followed:\n  math.square (math.*=acme): heads=48, allowed 64"
        )


class TestLayouts:
    """Ops that share private data agree on one layout."""

    @pytest.fixture
    def packed(self, small):
        """Serves both ops that touch weights, in a layout of its own."""

        class PackedMath(small.math):
            @provides(layouts={"dense_weight": "acme_packed_v1"})
            def prepare(self, w):
                return ("acme_packed_v1", w)

            @provides(layouts={"dense_weight": "acme_packed_v1"})
            def linear(self, x, weight, bias=0.0):
                assert weight[0] == "acme_packed_v1"
                return x * weight[1] + bias

        return PackedMath

    def layouts(self, ops) -> dict[str, str | None]:
        return {b.spec.method: b.layout for b in ops.bindings if b.spec.layouts}

    def test_one_provider_serves_the_group_and_core_composes_on_it(self, small, packed):
        ops = small.bind(small.offer(packed))
        assert self.layouts(ops) == {"prepare": "acme_packed_v1", "linear": "acme_packed_v1", "twice": None}
        assert ops.math.twice(3.0, ops.math.prepare(2.0)) == 12.0

    def test_an_incomplete_group_falls_back_as_a_whole(self, small, packed):
        class Half(packed):
            def refuse(self, op, traits):
                return ["rows=8, allowed 16"] if op == "math.prepare" else []

        ops = small.bind(small.offer(Half))
        assert self.layouts(ops) == {"prepare": CANONICAL, "linear": CANONICAL, "twice": None}
        assert ops.binding("math.linear").explain() == (
            "math.linear v1 -> core reference\n"
            f"  {ACME}: works on dense_weight layout acme_packed_v1, in which acme cannot serve math.prepare; "
            "ops of one layout come from one provider"
        )

    def test_an_undeclared_layout_counts_as_private(self, small):
        class Cautious(small.math):
            @provides()
            def linear(self, x, weight, bias=0.0):
                return x

        assert served(small.bind(small.offer(Cautious)))["math.linear"] == "reference"

    def test_layouts_of_two_providers_never_mix(self, small, packed):
        class Other(small.math):
            @provides(layouts={"dense_weight": "other"})
            def prepare(self, w):
                return w

        ops = small.bind(small.offer(Other, name="pack"), small.offer(packed))
        assert set(self.layouts(ops).values()) == {"acme_packed_v1", None}
        assert "cannot serve math.linear" in ops.binding("math.prepare").refused[0].reasons[0]

    def test_the_first_provider_decides_the_layout(self, small, packed):
        class OnCanonical(small.math):
            @provides(layouts={"dense_weight": CANONICAL})
            def linear(self, x, weight, bias=0.0):
                return x * weight[1] + bias

        ops = small.bind(small.offer(OnCanonical, name="pack"), small.offer(packed))
        assert served(ops)["math.linear"] == "pack"
        assert served(ops)["math.prepare"] == "reference"
        assert ops.binding("math.prepare").refused[1].reasons == (
            "works on layout acme_packed_v1; dense_weight is bound in core's own",
        )
        swapped = small.bind(small.offer(packed), small.offer(OnCanonical, name="pack"))
        assert served(swapped)["math.linear"] == "acme"

    def test_an_override_of_one_op_takes_the_group_along(self, small, packed):
        ops = small.bind(small.offer(packed), overrides=["math.linear=reference"])
        assert set(self.layouts(ops).values()) == {CANONICAL, None}
        assert ops.math.twice(3.0, ops.math.prepare(2.0)) == 12.0


class TestOpsWithTwoLayouts:
    """An op that reads two kinds of private data is served in both owners' layouts or not at all."""

    @pytest.fixture
    def contract(self):
        class PairOps(OpGroup):
            group = "pair"

            @op(layout="dense_weight")
            def dense(self, w):
                return w

            @op(layout="expert_weight")
            def expert(self, w):
                return w

            @op(layout=("dense_weight", "expert_weight"))
            def both(self, a, b):
                return a, b

        return PairOps

    def offer(self, small, contract, *methods: str, refuse: str = "") -> object:
        layouts = {"dense": ("dense_weight",), "expert": ("expert_weight",), "both": ("dense_weight", "expert_weight")}

        def dense(self, w):
            return w

        def expert(self, w):
            return w

        def both(self, a, b):
            return a, b

        made = {f.__name__: f for f in (dense, expert, both)}
        body = {m: provides(layouts=dict.fromkeys(layouts[m], "acme"))(made[m]) for m in methods}
        body["refuse"] = lambda self, op, traits: ["no"] if op == f"pair.{refuse}" else []
        return small.offer(type("AcmePair", (contract,), body))

    def bound(self, small, contract, *methods: str, refuse: str = "") -> dict[str, str | None]:
        offer = self.offer(small, contract, *methods, refuse=refuse)
        ops = bind([offer], small.context(), contracts=[contract])
        return {binding.spec.method: binding.layout for binding in ops.bindings}

    def test_all_of_it(self, small, contract):
        methods = ("dense", "expert", "both")
        assert self.bound(small, contract, *methods) == dict.fromkeys(methods, "acme")

    @pytest.mark.parametrize("lost", ["dense", "expert", "both"])
    def test_losing_one_op_loses_both_layouts(self, small, contract, lost):
        """Without `expert`, expert weights are core's, so `both` is core's, so dense weights must be core's, too."""
        expected = dict.fromkeys(("dense", "expert", "both"), CANONICAL)
        assert self.bound(small, contract, "dense", "expert", "both", refuse=lost) == expected
        assert self.bound(small, contract, *{"dense", "expert", "both"} - {lost}) == expected


class TestFilters:
    def test_strict_forbids_falling_back_after_a_refusal(self, small, acme):
        class Picky(acme):
            def refuse(self, op, traits):
                return ["heads=48, allowed 64"]

        with pytest.raises(OpBindingError) as caught:
            small.bind(small.offer(Picky), strict=True)
        assert str(caught.value) == (
            "DEEPINFER_STRICT_OPS=1: 1 op would fall back:\n"
            "math.square v1 -> core reference\n"
            f"  {ACME}: heads=48, allowed 64\n"
            "  Name the provider you accept with --op, or run without DEEPINFER_STRICT_OPS."
        )
        assert served(small.bind(small.offer(Picky), strict=True, overrides=["math.square=reference"]))

    def test_strict_accepts_ops_a_provider_never_had(self, small, acme):
        assert served(small.bind(small.offer(acme), strict=True))["math.linear"] == "reference"

    def test_batch_invariant_excludes_what_does_not_declare_it(self, small, acme):
        class Invariant(small.math):
            @provides(batch_invariant=True)
            def square(self, x):
                return x

        options = {"batch_invariant": True, "order_free": True}
        assert served(small.bind(small.offer(Invariant), **options))["math.square"] == "acme"
        ops = small.bind(small.offer(acme), **options)
        assert ops.binding("math.square").refused[0].reasons == ("not declared batch_invariant",)

    def test_batch_invariant_lists_ops_without_a_provider(self, small, acme):
        with pytest.raises(OpBindingError) as caught:
            small.bind(small.offer(acme), batch_invariant=True)
        text = str(caught.value)
        core = small.bind().bindings[0].provider
        why = "its sums depend on the other rows of a batch without numerics.order_free"
        assert text.startswith("DEEPINFER_BATCH_INVARIANT=1: 4 ops without a provider:\n")
        assert f"math.square v1 -> nobody\n  {ACME}: not declared batch_invariant\n  {core}: {why}\n" in text
        assert text.endswith("\n  Core's own bodies qualify with numerics.order_free.")
        assert "runtime." not in text  # moves data, sums nothing


class TestWholeGroups:
    def test_one_provider_for_every_op_inherited_bodies_included(self, small):
        class AcmeRuntime(small.runtime):
            @provides()
            def name(self):
                return "acme"

        ops = small.bind(small.offer(AcmeRuntime))
        assert [b.provider.name for b in ops.bindings if b.spec.group == "runtime"] == ["acme", "acme"]
        assert (ops.binding("runtime.name").kind, ops.binding("runtime.synchronize").kind) == ("native", "reference")

    def test_a_refused_op_refuses_the_group(self, small):
        class AcmeRuntime(small.runtime):
            @provides()
            def name(self):
                return "acme"

            def refuse(self, op, traits):
                return ["no device 7"]

        ops = small.bind(small.offer(AcmeRuntime))
        assert ops.binding("runtime.synchronize").provider.name == "reference"
        assert ops.binding("runtime.synchronize").refused[0].reasons == (
            "the group is bound whole; runtime.name: no device 7",
        )

    def test_later_groups_find_it_in_their_context(self, small, acme):
        class AcmeRuntime(small.runtime):
            @provides()
            def name(self):
                return "acme"

        seen = []

        class Looking(acme):
            def __init__(self, context):
                super().__init__(context)
                seen.append(context.runtime.name())

        small.bind(small.offer(AcmeRuntime, Looking))
        assert seen == ["acme"]


def test_the_table_is_frozen_in_both_levels(small):
    ops = small.bind()
    with pytest.raises(AttributeError, match="the op table is frozen; bind again to change 'math'"):
        ops.math = None
    with pytest.raises(AttributeError, match="frozen"):
        ops.math.square = None
    with pytest.raises(AttributeError):
        ops.math.other = None
    with pytest.raises(AttributeError, match="frozen"):
        del ops.math.square
    assert not hasattr(ops, "__dict__")
    assert not hasattr(ops.math, "__dict__")


def test_every_object_gets_the_table(small, acme):
    ops = small.bind(small.offer(acme))
    assert {binding.function.__self__.ops for binding in ops.bindings} == {ops}


def test_op_declarations_are_checked():
    with pytest.raises(ValueError, match="op level='vital', allowed: required, recommended, optional"):
        op(level="vital")
    with pytest.raises(ValueError, match="op layout='mine', allowed: kv_cache, dense_weight"):
        op(layout="mine")
