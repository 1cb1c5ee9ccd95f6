"""What an alarm is, and when it warned of an episode: every edge of the definitions on hand-made series."""

import itertools

from hypothesis import given
from hypothesis import strategies as st

from kvheadroom.lab.backtest.alarms import Alarm, Score, Warned, find_alarms, score
from kvheadroom.lab.backtest.events import Episode, Scale, Stretch, find_episodes
from tests.lab.backtest.series import episode, firing, seen

SCALE = Scale(horizon_seconds=10.0, episode_gap_seconds=4.0, alarm_gap_seconds=2.0, hold_seconds=3.0)


def scored(text: str, *episodes: Episode, stretches: tuple[Stretch, ...] | None = None) -> Score:
    """A letter per second."""
    return score(
        firing(text),
        episodes,
        every_seconds=1.0,
        scale=SCALE,
        stretches=stretches or (seen(0.0, len(text) - 1.0),),
    )


# --- alarms ---


def test_an_alarm_lasts_from_the_tick_at_which_it_fires_to_the_one_at_which_it_no_longer_does() -> None:
    assert find_alarms(firing("..###..."), 0.5, 0.0) == (Alarm(1.0, 2.5),)


def test_what_fires_at_the_end_ends_with_the_history() -> None:
    assert find_alarms(firing("..###"), 1.0, 0.0) == (Alarm(2.0, 4.0),)
    assert find_alarms(firing("....#"), 1.0, 0.0) == (Alarm(4.0, 4.0),)


def test_a_pause_up_to_the_gap_is_closed_and_a_longer_one_is_not() -> None:
    assert find_alarms(firing("#..#...#."), 1.0, 2.0) == (Alarm(0.0, 4.0), Alarm(7.0, 8.0))


def test_a_tick_at_which_the_engine_was_not_known_does_not_fire() -> None:
    assert find_alarms(firing("#?#"), 1.0, 0.5) == (Alarm(0.0, 1.0), Alarm(2.0, 2.0))
    assert find_alarms(firing("???"), 1.0, 2.0) == ()


# --- what an alarm is about ---


def test_an_alarm_up_to_the_horizon_before_an_episode_warns_of_it() -> None:
    result = scored("..#........................", episode(12.0))
    assert result.warned == (Warned(12.0, 2.0),)
    assert result.warned[0].lead_seconds == 10.0
    assert (result.missed, result.false_alarms) == (0, 0)


def test_an_alarm_longer_before_an_episode_is_false_even_if_it_still_fires() -> None:
    result = scored(".############..............", episode(12.0))
    assert result.warned == ()
    assert (result.missed, result.false_alarms) == (1, 1)


def test_an_alarm_that_no_event_follows_is_false() -> None:
    result = scored("..#........................")
    assert (result.missed, result.false_alarms, result.undecided) == (0, 1, 0)


def test_an_alarm_that_starts_inside_an_episode_is_neither() -> None:
    for start in (12, 14, 15):
        text = "".join("#" if tick == start else "." for tick in range(30))
        result = scored(text, episode(12.0, 15.0))
        assert (result.missed, result.false_alarms, result.started_late) == (1, 0, 1)


def test_an_alarm_just_after_an_episode_is_about_the_next_event() -> None:
    silent = "." * 16 + "#" + "." * 14
    assert scored(silent, episode(12.0, 15.0)).false_alarms == 1
    result = scored(silent, episode(12.0, 15.0), episode(20.0))
    assert result.warned == (Warned(20.0, 16.0),)
    assert (result.missed, result.false_alarms) == (1, 0)


def test_an_alarm_over_two_episodes_warns_of_the_first_alone() -> None:
    result = scored("..#############............", episode(5.0), episode(10.0))
    assert result.warned == (Warned(5.0, 2.0),)
    assert (result.missed, result.false_alarms) == (1, 0)


def test_of_two_alarms_before_one_episode_the_first_gives_the_lead_and_neither_is_false() -> None:
    result = scored("..#....#...................", episode(9.0))
    assert result.warned == (Warned(9.0, 2.0),)
    assert (result.missed, result.false_alarms) == (0, 0)


def test_an_alarm_whose_horizon_was_not_seen_to_its_end_is_undecided_unless_an_event_came() -> None:
    assert scored("....#.........").undecided == 1
    assert scored("...#..........").false_alarms == 1
    assert scored("....#.........", episode(13.0)).warned == (Warned(13.0, 4.0),)


def test_an_event_beyond_a_gap_tells_nothing_about_an_alarm_before_it() -> None:
    result = scored("..#...???.................", episode(10.0), stretches=(seen(0.0, 5.0), seen(9.0, 25.0)))
    assert result.warned == ()
    assert (result.missed, result.false_alarms, result.undecided) == (1, 0, 1)


def test_the_share_of_time_is_of_the_ticks_at_which_the_engine_was_known() -> None:
    assert scored("#.??").time_firing_ratio == 0.5
    assert scored("????").time_firing_ratio is None


def test_a_signal_that_never_fires_misses_everything_and_is_never_wrong() -> None:
    result = scored("." * 30, episode(5.0), episode(20.0))
    assert result == Score(
        alarms=(), warned=(), missed=2, false_alarms=0, started_late=0, undecided=0, time_firing_ratio=0.0
    )


# --- what must hold of every series ---

series = st.lists(st.sampled_from((True, False, None)), min_size=1, max_size=80)


@given(series, st.lists(st.integers(0, 80), unique=True, max_size=12))
def test_every_alarm_is_counted_once_and_every_episode_is_warned_of_or_missed(
    fires: list[bool | None], seconds: list[int]
) -> None:
    episodes = find_episodes(sorted(map(float, seconds)), SCALE.episode_gap_seconds)
    result = score(fires, episodes, every_seconds=1.0, scale=SCALE, stretches=(seen(0.0, len(fires) - 1.0),))
    assert len(result.warned) + result.missed == len(episodes)
    true = len(result.alarms) - result.false_alarms - result.started_late - result.undecided
    assert true >= len(result.warned)
    assert (true > 0) == bool(result.warned)
    assert all(0 < one.lead_seconds <= SCALE.horizon_seconds for one in result.warned)
    assert {one.preempted_at for one in result.warned} <= {one.preempted_at for one in episodes}


@given(series, st.sampled_from((0.0, 1.0, 3.0)))
def test_alarms_cover_what_fires_and_lie_further_apart_than_the_gap(
    fires: list[bool | None], gap: float
) -> None:
    alarms = find_alarms(fires, 1.0, gap)
    for tick, fired in enumerate(fires):
        inside = any(alarm.started_at <= tick <= alarm.ended_at for alarm in alarms)
        assert inside or not fired
    assert all(b.started_at - a.ended_at > gap for a, b in itertools.pairwise(alarms))
    assert all(fires[int(alarm.started_at)] for alarm in alarms)
