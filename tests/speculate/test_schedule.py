"""How many drafts are worth verifying: costs, calibration, the choice, pauses, statistics, and costs kept in files."""

from __future__ import annotations

import itertools
import json
import time

import numpy as np
import pytest

from deepinfer.speculate.confidence import Calibration, cumulative
from deepinfer.speculate.cost_store import stored_costs
from deepinfer.speculate.costs import MeasuredCosts, grid, sizes_by_importance
from deepinfer.speculate.schedule import PATIENCE, PROBE_INTERVAL, Choice, ConfidenceSchedule, FixedSchedule, Outcome
from deepinfer.speculate.statistics import SpeculationStats

N = 4


def linear(base: float = 10.0, slope: float = 1.0, drafting: float = 0.0) -> MeasuredCosts:
    """Steps of base + slope * rows milliseconds."""
    rows = np.array([1, 64])
    return MeasuredCosts(rows, base + slope * rows, np.array([1]), np.array([drafting]))


def choice(confidences, limits=None, fresh=True, record=None) -> Choice:
    confidences = np.array(confidences, dtype=np.float32)
    limits = np.full(len(confidences), confidences.shape[1]) if limits is None else np.array(limits)
    record = np.full(confidences.shape, np.nan) if record is None else np.array(record, dtype=np.float64)
    return Choice(confidences, record, limits, fresh)


def best_by_trying(rates: np.ndarray, costs: MeasuredCosts) -> float:
    """The most expected tokens a millisecond over every choice of lengths."""
    count, width = rates.shape
    values = []
    for lengths in itertools.product(range(width + 1), repeat=count):
        expected = count + sum(float(rates[i, :k].sum()) for i, k in enumerate(lengths))
        values.append(expected / (float(costs.step(np.array(count + sum(lengths)))) + costs.drafting(count)))
    return max(values)


@pytest.mark.parametrize("slope", [0.01, 0.5, 3.0, 20.0])
@pytest.mark.parametrize("seed", range(5))
def test_no_choice_is_better(slope, seed):
    random = np.random.default_rng(seed)
    costs, confidences = linear(slope=slope, drafting=2.0), random.uniform(0, 1, (3, N))
    chosen = ConfidenceSchedule(N, costs).choose(choice(confidences))
    rates = cumulative(confidences)
    expected = 3 + sum(float(rates[i, :k].sum()) for i, k in enumerate(chosen.tolist()))
    value = expected / (float(costs.step(np.array(3 + chosen.sum()))) + costs.drafting(3))
    assert value == pytest.approx(best_by_trying(rates, costs), rel=1e-6)


def test_cheap_rows_take_all_and_dear_rows_none():
    assert ConfidenceSchedule(N, linear(slope=0.0)).choose(choice([[0.5] * N])).tolist() == [N]
    assert ConfidenceSchedule(N, linear(slope=50.0)).choose(choice([[0.5] * N])).tolist() == [0]


def test_limits_hold_and_the_confident_sequence_gets_the_rows():
    schedule = ConfidenceSchedule(N, linear(slope=3.0))
    chosen = schedule.choose(choice([[0.95] * N, [0.05] * N, [0.95] * N], limits=[4, 4, 1]))
    assert chosen.tolist() == [4, 0, 1]
    assert FixedSchedule().choose(choice([[0.1] * N] * 2, limits=[3, 0])).tolist() == [3, 0]
    missing = [[0.1, 0.1, 0.0, 0.0], [np.nan] * N]
    assert FixedSchedule().choose(choice(missing)).tolist() == [2, 4]
    assert FixedSchedule().choose(choice(missing, fresh=False)).tolist() == [4, 4]


def test_stale_confidences_are_tempered_by_the_sequences_record():
    confidences, poor = [[0.9] * N], [[0.0] * N]
    fresh = ConfidenceSchedule(N, linear(slope=8.0)).choose(choice(confidences, record=poor))
    stale = ConfidenceSchedule(N, linear(slope=8.0)).choose(choice(confidences, fresh=False, record=poor))
    unknown = ConfidenceSchedule(N, linear(slope=8.0)).choose(choice(confidences, fresh=False))
    assert (fresh[0], unknown[0]) == (4, 4)
    assert stale[0] < 4


def test_sequences_without_drafts_so_far_count_with_what_is_usual():
    schedule = ConfidenceSchedule(N, linear(slope=0.1))
    assert schedule.choose(choice([[np.nan] * N, [0.9] * N], limits=[4, 4])).tolist()[1] == 4


def test_calibration_corrects_overconfidence_by_position():
    calibration = Calibration(2)
    rates = np.array([[0.9, 0.81]] * 10)
    for _ in range(100):
        calibration.observe(rates, np.full(10, 2), np.array([1] * 9 + [0]))  # the second is never accepted
    found = calibration.apply(rates)[0]
    assert found[0] == pytest.approx(0.9, abs=0.02)
    assert found[1] < 0.05
    rising = Calibration(2)
    for _ in range(50):
        rising.observe(np.array([[0.2, 0.1]]), np.array([2]), np.array([2]))
    assert (np.diff(rising.apply(np.array([[0.2, 0.1]]))[0]) <= 0).all()


def outcome(schedule, confidence: float, accepted: int) -> Outcome:
    return Outcome(N + 1, True, None, np.full((1, N), confidence, np.float32), np.array([N]), np.array([accepted]))


def test_drafting_that_loses_pauses_and_is_looked_at_now_and_then():
    schedule = ConfidenceSchedule(N, linear(slope=1.0, drafting=5.0))
    hopeless, hopeful = choice([[0.01] * N]), choice([[0.99] * N])
    for _ in range(4 * PATIENCE):
        schedule.choose(hopeless)
    drafting = []
    for _ in range(2 * PROBE_INTERVAL):
        assert schedule.choose(hopeless).tolist() == [0]
        drafting.append(schedule.draft_next())
    assert sum(drafting) == 2
    assert schedule.choose(hopeful).tolist() == [N], "one look is enough to begin again"
    assert schedule.draft_next()


def test_a_bound_set_by_earlier_steps_rules_under_rejection():
    """The choice of a step depends on its own rates through a fixed bound only: its later drafts change nothing."""
    made = []
    for late in (0.01, 0.99):
        schedule = ConfidenceSchedule(N, linear(slope=3.0), budgeted=True)
        schedule.choose(choice([[0.9, 0.8, 0.7, 0.6]]))
        made.append(schedule.choose(choice([[0.9, 0.9, late, late], [0.9, 0.5, 0.5, 0.5]])))
    assert made[0][0] >= 2 and made[1][0] >= 2
    assert made[0][1] == made[1][1], "another sequence's late drafts do not matter"


def test_costs_interpolate_never_fall_and_go_straight_on():
    costs = MeasuredCosts(np.array([1, 2, 4]), np.array([10.0, 9.0, 14.0]), np.array([1, 3]), np.array([2.0, 4.0]))
    np.testing.assert_allclose(costs.step(np.array([1, 2, 3, 4, 7])), [10, 10, 12, 14, 18])
    assert [costs.drafting(n) for n in (1, 2, 5)] == [2.0, 3.0, 6.0]


def test_costs_follow_what_steps_take_and_ignore_hiccups():
    costs = linear(base=10.0, slope=0.0)
    for step in range(200):
        costs.observe(1, 1, False, 500.0 if step % 40 == 7 else 20.0)
    assert float(costs.step(np.array(1))) == pytest.approx(20.0, rel=0.01)
    for _ in range(200):
        costs.observe(30, 2, True, 50.0)
    assert float(costs.step(np.array(30))) + costs.drafting(2) == pytest.approx(50.0, rel=0.01)


@pytest.mark.parametrize("largest", [1, 5, 8, 9, 100, 1536])
def test_grid(largest):
    sizes = grid(largest)
    assert (sizes[0], sizes[-1]) == (1, largest)
    assert sizes == sorted(set(sizes))
    assert len(sizes) < 30
    for width in (1, 2, 6):
        ordered = sizes_by_importance(largest, width)
        assert ordered[0] == 1 and set(sizes) <= set(ordered) and len(ordered) == len(set(ordered))
        assert max(ordered) == largest
    assert sizes_by_importance(100, 6)[:3] == [1, 6, 12]


def test_statistics():
    stats = SpeculationStats(2)
    stats.add_proposals(np.array([[4, 5], [6, -1]]))
    confidences = np.array([[0.5, 0.5], [np.nan, np.nan]], dtype=np.float32)
    stats.add(confidences, np.array([2, 1]), np.array([1, 1]))
    assert (stats.generated.tolist(), stats.verified.tolist(), stats.accepted.tolist()) == ([2, 1], [2, 1], [2, 0])
    assert stats.acceptance.tolist() == [1.0, 0.0]
    assert stats.calibration_error == pytest.approx((abs(0.5 - 1) + abs(0.25 - 0)) / 2)
    assert "3 generated, 3 verified, 2 accepted" in stats.line()
    stats.reset()
    assert stats.calibration_error == 0.0 == stats.verified.sum()


# --- files ---

KEY = {"device": "d", "version": "1", "sizes": [1, 2]}


def test_costs_are_measured_once_per_key_and_kept(tmp_path):
    measured = []

    def measure():
        measured.append(1)
        return linear(base=3.0)

    for key in (KEY, KEY, KEY | {"version": "2"}, KEY):
        found = stored_costs(tmp_path / "new", key, 100.0, measure)
        np.testing.assert_array_equal(found.step_ms, linear(base=3.0).step_ms)
    assert len(measured) == 2
    assert len(list((tmp_path / "new").iterdir())) == 2


def test_old_and_broken_files_are_measured_anew_and_foreign_ones_left_alone(tmp_path, caplog):
    (tmp_path / "notes.txt").write_text("mine")
    (tmp_path / "deepinfer-step-costs-other.json").write_text("{}")
    stored_costs(tmp_path, KEY, 100.0, linear)
    (own,) = [path for path in tmp_path.glob("deepinfer-step-costs-*.json") if "other" not in path.name]
    record = json.loads(own.read_text())
    for broken in ({**record, "time": time.time() - 101}, {**record, "time": time.time() + 50}, {"time": 1}, [1],
                   {**record, "step_ms": [float("nan")]}, {**record, "key": {}}):  # fmt: skip
        own.write_text(json.dumps(broken))
        found = stored_costs(tmp_path, KEY, 100.0, lambda: linear(base=7.0))
        np.testing.assert_array_equal(found.step_ms, linear(base=7.0).step_ms)
    own.write_text("not json")
    stored_costs(tmp_path, KEY, 100.0, linear)
    assert "measuring anew" in caplog.text
    assert (tmp_path / "notes.txt").read_text() == "mine"
    assert (tmp_path / "deepinfer-step-costs-other.json").read_text() == "{}"
    assert len(list(tmp_path.iterdir())) == 3, "no temporary file is left"


def test_a_directory_that_cannot_be_written_costs_a_warning_only(tmp_path, caplog):
    (tmp_path / "file").write_text("")
    assert stored_costs(tmp_path / "file" / "below", KEY, 100.0, linear).rows.tolist() == [1, 64]
    assert "cannot be" in caplog.text
