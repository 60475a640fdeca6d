"""The ledger counts every release, with parameters that are never too favourable."""

import hypothesis
import pytest
import tensorflow as tf
from dp_accounting import GaussianDpEvent, LaplaceDpEvent
from hypothesis import strategies as st

from tests.helpers import zoo
from tf_adaptive_dp.accounting import BandedNoise, epsilon_spent
from tf_adaptive_dp.accounting.ledger import Ledger
from tf_adaptive_dp.accounting.releases import Releases, Segment
from tf_adaptive_dp.errors import NotPrivateError
from tf_adaptive_dp.sampling import PoissonSampling

RELEASES = [(1.1, 250.0)] * 3 + [(0.7, 250.0)] * 2 + [(0.7, 100.0)] + [(1.1, 250.0)] * 2
SEGMENTS = [(1.1, 250.0, 3), (0.7, 250.0, 2), (0.7, 100.0, 1), (1.1, 250.0, 2)]


class SmallLedger(Ledger):
    """Overflows at once."""

    MAX_SEGMENTS = 3


def test_what_an_iterator_gives_counts_however_often_it_is_read():
    events, known = [GaussianDpEvent(2.0)], [(9, 3, 1)]
    releases = Releases([(2.0, 8.0, 9)], events, known)
    given = Releases(iter([(2.0, 8.0, 9)]), iter(events), iter(known))
    for sampling in (epsilon_spent, PoissonSampling(0.02, 401, 9).epsilon_spent):
        for _ in range(2):
            assert sampling(given, 400, 1e-3) == sampling(releases, 400, 1e-3)
    ledger = Ledger(lambda shape, dtype, name: tf.Variable(tf.zeros(shape, dtype)))
    ledger.other_events = iter(events)
    assert ledger._events.numpy()[0] == 2.0  # what a saved state has


def record_all(ledger, releases, mode):
    record = {
        "eager": ledger.record,
        "graph": tf.function(ledger.record),
        "xla": tf.function(ledger.record, jit_compile=True),
    }
    if mode in record:
        for noise_multiplier, batch_size in releases:
            record[mode](
                tf.constant(noise_multiplier, tf.float64), tf.constant(batch_size, tf.float64)
            )
        return

    @tf.function(jit_compile="xla" in mode)
    def loop(releases):
        for release in releases:
            ledger.record(release[0], release[1])

    loop(tf.constant(releases, tf.float64))


@pytest.mark.slow_after(1)
@pytest.mark.parametrize("mode", ["eager", "graph", "xla", "loop", "loop in xla"])
def test_releases_in_a_row_that_share_their_parameters_are_one_segment(mode):
    ledger = Ledger(zoo.add_variable)
    record_all(ledger, RELEASES, mode)
    assert ledger.segments == SEGMENTS
    assert ledger.num_releases == 8


def test_several_releases_in_one_graph_are_all_counted():
    ledger = Ledger(zoo.add_variable)

    @tf.function
    def step():
        for noise_multiplier in (1.0, 1.0, 2.0):
            ledger.record(noise_multiplier, 8.0)

    step()
    step()
    assert ledger.segments == [(1.0, 8.0, 2), (2.0, 8.0, 1), (1.0, 8.0, 2), (2.0, 8.0, 1)]


def test_nothing_is_recorded_when_a_graph_is_traced_but_not_run():
    ledger = Ledger(zoo.add_variable)
    tf.function(ledger.record).get_concrete_function(1.0, 8.0)
    assert ledger.segments == [] and ledger.num_releases == 0


def test_a_new_ledger_is_empty():
    ledger = Ledger(zoo.add_variable)
    assert ledger.segments == [] and ledger.num_releases == 0 and ledger.other_events == ()


def test_noise_multiplier_zero_is_a_release_like_any_other():
    ledger = Ledger(zoo.add_variable)
    record_all(ledger, [(0.0, 0.0)] * 2, "eager")
    assert ledger.segments == [(0.0, 0.0, 2)]


def test_values_are_kept_in_double_precision():
    ledger = Ledger(zoo.add_variable)
    record_all(ledger, [(1.1, 1e9 + 1), (1.1 + 1e-12, 1e9 + 1)], "graph")
    assert ledger.segments == [(1.1, 1e9 + 1, 1), (1.1 + 1e-12, 1e9 + 1, 1)]


@pytest.mark.slow_after(1)
@pytest.mark.parametrize("mode", ["eager", "loop", "loop in xla"])
def test_segments_beyond_the_last_merge_to_the_worst(mode):
    count = Ledger.MAX_SEGMENTS
    assert count == 64
    distinct = [(10.0 + k, 100.0) for k in range(count)]
    beyond = [(5.0, 50.0), (7.0, 300.0), (6.0, 200.0), (6.0, 200.0)]
    ledger = Ledger(zoo.add_variable)
    record_all(ledger, distinct + beyond, mode)
    assert ledger.segments[:-1] == [(*d, 1) for d in distinct[:-1]]
    assert ledger.segments[-1] == (5.0, 300.0, 5)
    assert ledger.num_releases == count + 4


def test_after_an_overflow_the_worst_parameters_go_on_without_change():
    ledger = SmallLedger(zoo.add_variable)
    pairs = [(3.0, 1.0), (2.0, 1.0), (1.0, 1.0), (2.0, 2.0), (1.0, 2.0)]
    record_all(ledger, pairs, "eager")
    assert ledger.segments == [(3.0, 1.0, 1), (2.0, 1.0, 1), (1.0, 2.0, 3)]
    listed = [[]]
    for pair in pairs:
        listed.append(SmallLedger.extended(listed[-1], Segment(*pair, 1)))
    assert listed[-1] == ledger.segments
    assert all(SmallLedger.extends(ledger.segments, earlier) for earlier in listed)
    with_more_noise = [*listed[2], Segment(1.5, 2.0, 3)]
    assert not SmallLedger.extends(ledger.segments, with_more_noise)
    *before, last = ledger.segments
    in_larger_batches = [*before, last._replace(batch_size=2 * last.batch_size, num_releases=1)]
    assert not SmallLedger.extends(ledger.segments, in_larger_batches)


@hypothesis.settings(max_examples=30)
@hypothesis.given(
    st.lists(st.tuples(st.sampled_from([0.5, 1.0, 2.0]), st.sampled_from([8.0, 16.0])), max_size=20)
)
def test_every_release_is_counted_with_parameters_as_bad_as_its_own(releases):
    ledger = SmallLedger(zoo.add_variable)
    record_all(ledger, releases, "eager")
    segments = ledger.segments
    recorded = [s for s in segments for _ in range(s.num_releases)]
    assert len(recorded) == ledger.num_releases == len(releases)
    for segment, (noise_multiplier, batch_size) in zip(recorded, releases):
        assert segment.noise_multiplier <= noise_multiplier
        assert segment.batch_size >= batch_size
        if len(segments) < 3 or segment is not segments[-1]:
            assert segment[:2] == (noise_multiplier, batch_size)


def test_a_restored_ledger_goes_on_in_the_same_segment():
    ledger, restored = Ledger(zoo.add_variable), Ledger(zoo.add_variable)
    record_all(ledger, RELEASES, "eager")
    record_all(restored, [(9.0, 9.0)] * 5 + [(8.0, 8.0)] * 5, "eager")
    # As JSON gives them.
    restored.restore([list(segment) for segment in ledger.segments])
    assert restored.segments == SEGMENTS
    record_all(restored, [(1.1, 250.0), (3.0, 250.0)], "graph")
    assert restored.segments == [*SEGMENTS[:-1], (1.1, 250.0, 3), (3.0, 250.0, 1)]


def test_restoring_nothing_empties_the_ledger():
    ledger = Ledger(zoo.add_variable)
    record_all(ledger, RELEASES, "eager")
    ledger.restore([])
    assert ledger.segments == []


def test_a_full_ledger_can_be_restored():
    full = [(float(k + 1), 8.0, k + 1) for k in range(Ledger.MAX_SEGMENTS)]
    ledger = Ledger(zoo.add_variable)
    ledger.restore(full)
    assert ledger.segments == full
    record_all(ledger, [(0.5, 16.0)], "eager")
    assert ledger.segments == [*full[:-1], (0.5, 16.0, Ledger.MAX_SEGMENTS + 1)]


def with_checkpoint(**kwargs):
    variables = {}

    def add_variable(shape, dtype=None, name=None):
        return variables.setdefault(name, zoo.add_variable(shape, dtype, name))

    return Ledger(add_variable, **kwargs), tf.train.Checkpoint(**variables)


def test_the_ledger_lives_in_the_variables_that_it_was_given(tmp_path):
    ledger, checkpoint = with_checkpoint()
    record_all(ledger, RELEASES, "eager")
    path = checkpoint.save(tmp_path / "ledger")
    restored, checkpoint = with_checkpoint()
    checkpoint.restore(path).assert_consumed()
    assert restored.segments == SEGMENTS


A, B, LAPLACE = GaussianDpEvent(3.0), GaussianDpEvent(1), LaplaceDpEvent(0.5)


def loaded(path, saved, own, **kwargs):
    """A ledger with own events, into which one with other events was loaded."""
    ledger, checkpoint = with_checkpoint()
    ledger.record(1.0, 8.0)
    ledger.other_events = saved
    path = checkpoint.save(path / "ledger")
    restored, checkpoint = with_checkpoint(**kwargs)
    restored.other_events = own
    checkpoint.restore(path)
    return restored


@pytest.mark.parametrize("events", [2.0, "public", [2.0], [A, "public"], A])
def test_other_events_must_be_a_list_of_events(events):
    ledger, _ = with_checkpoint()
    ledger.other_events = [B]
    with pytest.raises(TypeError, match="`other_events` must be a list of .*Received: other_ev"):
        ledger.other_events = events
    assert ledger.other_events == (B,)
    with pytest.raises(TypeError, match="`other_events` must be a list of .*Received: other_ev"):
        Releases(other_events=events)


def test_other_events_that_come_one_by_one_are_saved(tmp_path):
    assert loaded(tmp_path, iter([A, B]), ()).other_events == (A, B)


@pytest.mark.parametrize(
    "saved, own, expected",
    [
        ((A, B), (), (A, B)),
        ((A, A), (), (A, A)),
        ((A, B), (B, A), (B, A)),  # made anew as it was then
        ((A,), (A, A), (A, A)),
        ((A, A), (A,), (A, A)),
        ((), (A, LAPLACE), (A, LAPLACE)),
        ((B, LAPLACE), (LAPLACE, GaussianDpEvent(1.0)), (LAPLACE, B)),
        ((GaussianDpEvent(1.0),) * 16, (), (B,) * 16),
    ],
)
def test_events_travel_with_the_ledger_and_none_is_lost(saved, own, expected, tmp_path):
    assert loaded(tmp_path, saved, own).other_events == expected


@pytest.mark.parametrize(
    "saved, own",
    [
        ((A,), (B,)),
        ((LAPLACE,), ()),
        ((A, LAPLACE), (A,)),
        ((GaussianDpEvent(0.0),), ()),
        ((B,) * 17, ()),  # more than are saved
    ],
)
def test_events_that_cannot_be_known_are_asked_for(saved, own, tmp_path):
    ledger = loaded(tmp_path, saved, own)
    for read in (lambda: ledger.other_events, lambda: ledger.noise):
        with pytest.raises(ValueError, match="Set `optimizer.ledger.other_events` to everything"):
            read()
    with pytest.raises(ValueError, match="Set `optimizer.ledger.other_events` to everything"):
        epsilon_spent(ledger, 100, 1e-3)
    ledger.other_events = (*saved, *own)
    assert ledger.other_events == (*saved, *own)
    assert epsilon_spent(ledger, 100, 1e-3) > 0


@pytest.mark.parametrize(
    "kwargs, match", [({"examples_per_user": 4}, "unit"), ({"noise": BandedNoise(2)}, "`noise`")]
)
def test_releases_of_another_unit_or_noise_have_no_epsilon(kwargs, match, tmp_path):
    ledger = loaded(tmp_path, (), (), **kwargs)
    for _ in range(2):
        for read in ("other_events", "examples_per_user", "noise"):
            with pytest.raises(ValueError, match=f"another .*{match}"):
                getattr(ledger, read)
        ledger.other_events = (A,)  # which settles what they are, and nothing else


releases = st.lists(
    st.tuples(st.sampled_from([0.5, 1.0, 2.0]), st.sampled_from([8.0, 16.0])), max_size=12
)


def recorded(pairs):
    ledger = SmallLedger(zoo.add_variable)
    for noise_multiplier, batch_size in pairs:
        ledger.record(noise_multiplier, batch_size)
    return ledger.segments


@pytest.mark.slow
@hypothesis.settings(max_examples=30)
@hypothesis.given(releases, st.integers(1, 4))
def test_a_list_of_segments_is_extended_as_the_ledger_records(pairs, count):
    segments = []
    for noise_multiplier, batch_size in pairs:
        segments = SmallLedger.extended(segments, Segment(noise_multiplier, batch_size, count))
    assert segments == recorded([pair for pair in pairs for _ in range(count)])


@pytest.mark.parametrize(
    "one, other",
    [
        (((0.5, 8.0), True, 0, 0.0), ((1.0, 16.0), False, 7, 0.0)),
        (((1.0, 16.0), True, 3, 0.0), ((0.5, 8.0), True, 7, 20.0)),
        (((1.0, 8.0), True, 5, 30.0), ((0.5, 16.0), False, 2, 40.0)),
    ],
)
def test_segments_and_what_is_known_of_them_merge_as_the_ledger_records(one, other):
    def recorded_in(ledger, release):
        parameters, checked, distance, size_seen = release
        ledger.record(*parameters, checked=checked, distance=distance, size_seen=size_seen)
        return ledger.segments[-1], ledger.checks[-1]

    alone = [recorded_in(Ledger(zoo.add_variable), release) for release in (one, other)]
    full = SmallLedger(zoo.add_variable)
    full.restore([(4.0, 1.0, 1), (3.0, 1.0, 1)])
    recorded_in(full, one)
    segment, known = recorded_in(full, other)
    assert segment == alone[0][0].merged(alone[1][0]) == alone[1][0].merged(alone[0][0])
    assert known == alone[0][1].merged(alone[1][1]) == alone[1][1].merged(alone[0][1])
    assert len(full.segments) == SmallLedger.MAX_SEGMENTS


@pytest.mark.slow
@hypothesis.settings(max_examples=30)
@hypothesis.given(releases, releases)
def test_a_ledger_extends_its_earlier_states_alone(pairs, more):
    earlier, later = recorded(pairs), recorded([*pairs, *more])
    assert SmallLedger.extends(later, earlier)
    assert SmallLedger.extends(earlier, later) == (earlier == later)


@pytest.mark.parametrize("foreign", [(1.2, 8.0, 2), (1.1, 9.0, 2), (1.1, 8.0, 4)])
def test_the_ledger_of_another_run_is_not_extended(foreign):
    segments = [Segment(1.1, 8.0, 3), Segment(2.0, 8.0, 3)]
    assert not Ledger.extends(segments, [Segment(*foreign)])
    assert not Ledger.extends(segments[:1], [Segment(*foreign)])
    assert not Ledger.extends(segments, [Segment(1.1, 8.0, 2), segments[1]])


def test_a_ledger_that_was_set_back_has_no_epsilon_until_somebody_says_what_counts(tmp_path):
    ledger, checkpoint = with_checkpoint()
    path = checkpoint.save(tmp_path / "before")
    record_all(ledger, RELEASES, "graph")
    all_of_them = epsilon_spent(ledger, 1_000, 1e-5)
    checkpoint.restore(path)
    assert ledger.num_releases == 0
    with pytest.raises(NotPrivateError, match=r"restore\(\[\(0.7, 250.0, 8\), .* 8 fewer"):
        epsilon_spent(ledger, 1_000, 1e-5)
    record_all(ledger, [(2.0, 100.0)] * 9, "graph")  # more than before: it must still show
    with pytest.raises(NotPrivateError, match=r"restore\(\[\(0.7, 250.0, 8\), .* 8 fewer"):
        epsilon_spent(ledger, 1_000, 1e-5)
    ledger.restore([(0.7, 250.0, 8), *ledger.segments], [(), *ledger.checks])
    assert ledger.segments == [(0.7, 250.0, 8), (2.0, 100.0, 9)]
    assert epsilon_spent(ledger, 1_000, 1e-5) > all_of_them


def test_releases_that_were_loaded_count_among_those_that_a_ledger_loses(tmp_path):
    other, checkpoint = with_checkpoint()
    record_all(other, [(0.5, 300.0)] * 5, "eager")
    path = checkpoint.save(tmp_path / "other")
    ledger, checkpoint = with_checkpoint()
    empty = checkpoint.save(tmp_path / "empty")
    checkpoint.restore(path)
    ledger.require_nothing_lost()  # more than there was
    record_all(ledger, [(1.0, 100.0)], "eager")
    checkpoint.restore(empty)
    with pytest.raises(NotPrivateError, match=r"restore\(\[\(0.5, 300.0, 6\)"):
        ledger.require_nothing_lost()
    ledger.restore([])  # all of it was about other examples
    assert epsilon_spent(ledger, 1_000, 1e-5) == 0


def test_what_was_restored_is_noticed_when_it_is_lost(tmp_path):
    ledger, checkpoint = with_checkpoint()
    record_all(ledger, [(1.0, 100.0)] * 2, "eager")
    path = checkpoint.save(tmp_path / "before")
    ledger.restore([(0.5, 300.0, 7)])
    assert (ledger.num_lost, ledger.num_recorded_here) == (0, 2)  # it did not record the seven
    checkpoint.restore(path)
    assert (ledger.num_lost, ledger.num_recorded_here) == (5, 2)
    with pytest.raises(NotPrivateError, match="2 releases in the ledger, 5 fewer"):
        ledger.require_nothing_lost()


def test_a_state_that_was_loaded_does_not_hide_the_fewest_units_from_a_record(tmp_path):
    ledger, checkpoint = with_checkpoint()
    path = checkpoint.save(tmp_path / "before")
    ledger.note_units(150)
    record_all(ledger, [(1.0, 100.0)], "eager")
    segments = ledger.segments
    checkpoint.restore(path)
    assert ledger.fewest_units is None
    ledger.restore(segments)
    assert ledger.fewest_units == 150


def test_the_fewest_units_of_all_releases_count():
    ledger = Ledger(zoo.add_variable)
    for noted in (100, 300, 200):  # nothing was released, so earlier numbers do not matter
        ledger.note_units(noted)
        assert ledger.fewest_units == noted
    record_all(ledger, [(1.0, 8.0)], "eager")
    for noted, fewest in ((300, 200), (150, 150), (200, 150)):
        ledger.note_units(noted)
        assert ledger.fewest_units == fewest
    for of_another, fewest in ((170, 150), (None, 150), (90, 90)):
        ledger.lower_units(of_another)
        assert ledger.fewest_units == fewest


@pytest.mark.parametrize("events", [(), (A, LAPLACE)])
@pytest.mark.parametrize("saved, own", [(True, False), (False, True), (False, False)])
def test_a_state_may_add_the_mark_of_a_search_but_never_removes_it(saved, own, events, tmp_path):
    def marked(chosen):
        ledger, checkpoint = with_checkpoint()
        ledger.other_events, ledger.chosen_by_search = events, chosen
        return ledger, checkpoint

    path = marked(saved)[1].save(tmp_path / "ledger")
    ledger, checkpoint = marked(own)
    checkpoint.restore(path)
    assert ledger.other_events == events  # the mark is not among what has to agree
    assert ledger.chosen_by_search == (saved or own)
    empty, of_empty = with_checkpoint()
    of_empty.restore(checkpoint.save(tmp_path / "again"))
    assert empty.chosen_by_search == (saved or own)
    ledger.restore([(1.0, 8.0, 3)])
    ledger.other_events = ()
    assert ledger.chosen_by_search == (saved or own)
    ledger.chosen_by_search = False  # the search was on other data
    assert not ledger.chosen_by_search
    of_empty.restore(checkpoint.save(tmp_path / "at last"))
    assert empty.chosen_by_search == (saved or own)


def test_the_mark_of_a_search_says_nothing_of_the_other_terms(tmp_path):
    ledger = loaded(tmp_path, (), (), examples_per_user=4)
    ledger.chosen_by_search = True
    with pytest.raises(ValueError, match="another unit of privacy"):
        ledger.examples_per_user  # noqa: B018
    with pytest.raises(TypeError, match="`chosen_by_search` must be True or False. Received: .*1"):
        ledger.chosen_by_search = 1
