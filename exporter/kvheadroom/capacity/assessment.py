"""The table of contents of the core: one reading of one engine -> everything that is said about it.

    facts + snapshot + past -> predict (-> calibrate) -> observe -> count_sessions -> hit_windows -> find_binding_limit
        -> forecast, compare, make_ledger, estimate_occupancy, find_states, findings -> Assessment

Nothing right of `Assessment` computes: every number that an output shows is in here.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

from kvheadroom.capacity.binding_limit import (
    Admission,
    BindingLimit,
    Need,
    find_binding_limit,
    usual_blocks,
    usual_tokens,
)
from kvheadroom.capacity.calibration import CalibratedPrediction
from kvheadroom.capacity.comparison import Difference, compare
from kvheadroom.capacity.engine_states import StateFound, find_states
from kvheadroom.capacity.facts import EngineFacts, Origin
from kvheadroom.capacity.forecast import Forecast, forecast
from kvheadroom.capacity.history import (
    Growth,
    LastHour,
    Moment,
    PastFigures,
    Recent,
    growth,
    growth_since_start,
    moment_of,
)
from kvheadroom.capacity.host_tier import HostUse
from kvheadroom.capacity.kv_cache import KvLayout
from kvheadroom.capacity.ledger import Ledger, make_ledger, with_calibrated
from kvheadroom.capacity.observation import Observation, observe
from kvheadroom.capacity.occupancy import TokenOccupancy, estimate_occupancy
from kvheadroom.capacity.offload_tier import OffloadTier, plan_tier
from kvheadroom.capacity.own_start import OwnStart
from kvheadroom.capacity.prediction import Prediction, predict
from kvheadroom.capacity.prefix_cache import (
    FINDINGS_WINDOW,
    HitWindow,
    findings,
    hit_granularity,
    hit_windows,
    mean_tokens,
)
from kvheadroom.capacity.readings import (
    EngineSnapshot,
    PageProblem,
    ProblemReason,
    ToldTier,
)
from kvheadroom.capacity.reuse import Reuse
from kvheadroom.capacity.sessions import SessionCapacity, count_sessions
from kvheadroom.capacity.warm_sessions import Warmth, assess_warmth
from kvheadroom.capacity.warmth import Tiers


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """Facts and snapshot of one engine at one instant, and what it said before.

    Attributes:
        taken_at: unix seconds.
        past: where each window begins, by its name in WINDOWS; of windows that reach back without a gap or a restart.
        recent: the instants of the last minutes that the newest scrape is compared with.
        five_minutes: every scrape of the last five minutes, at most one a second.
        host_use: the memory of the server's host, which may be half a minute older; None where it is not seen.
        last_hour: one scrape a minute of the last hour.
        facts_at: unix seconds at which all but what the engine repeats on its page was last asked for; None where that is not known.
    """

    facts: EngineFacts
    snapshot: EngineSnapshot
    taken_at: float
    past: Mapping[str, Moment] = field(default_factory=dict)
    recent: Recent = field(default_factory=Recent)
    five_minutes: PastFigures = field(default_factory=PastFigures)
    host_use: HostUse | None = None
    last_hour: LastHour = field(default_factory=LastHour)
    facts_at: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Assessment:
    """One engine: prediction, observation, their difference, and every number in between.

    Attributes:
        calibrated: what starts of the same kind make of it, its own left out; None where there is none.
        own_start: what it tells itself for the next one; None where nobody watches starts.
        last_hour, facts_at: of the reading.
        problems: what the engine says of itself that cannot all be true, or means something else than it seems to.
    """

    facts: EngineFacts
    snapshot: EngineSnapshot
    taken_at: float
    prediction: Prediction
    calibrated: CalibratedPrediction | None = None
    own_start: OwnStart | None = None
    observation: Observation
    sessions: tuple[SessionCapacity, ...]
    difference: Difference | None
    ledger: Ledger | None
    occupancy: TokenOccupancy
    hit_windows: tuple[HitWindow, ...]
    binding_limit: BindingLimit
    forecast: Forecast
    states: tuple[StateFound, ...]
    warmth: Warmth
    problems: tuple[PageProblem, ...]
    last_hour: LastHour = field(default_factory=LastHour)
    facts_at: float | None = None

    @property
    def sample_edition(self) -> int:
        """Of the estimate that the start's own sample is told beside; 0 where the overhead of the prediction is no estimate."""
        sample = None if self.own_start is None else self.own_start.sample
        is_estimate = self.facts.overhead_bytes.origin is Origin.ESTIMATED
        return sample.edition if sample is not None and is_estimate else 0


def assess(
    reading: Reading,
    session_tokens: tuple[int, ...],
    prediction: Prediction | None = None,
    *,
    calibrated: CalibratedPrediction | None = None,
    own_start: OwnStart | None = None,
    idle_seconds: tuple[float, ...] = (),
    reuse: Reuse | str | None = None,
) -> Assessment:
    """Everything about one engine at one instant.

    Args:
        prediction: what `predict` gives for its facts, where it is known already.
        calibrated: what `calibrate` gives for them with what was learned of other starts.
        own_start: what its present start tells.
        idle_seconds: for how long sessions may have been idle, to say whether they are still warm.
    """
    facts, snapshot = reading.facts, reading.snapshot
    if prediction is None:
        prediction = predict(facts)
    observation = observe(snapshot, facts, prediction.layout)
    now = moment_of(snapshot, reading.taken_at)
    growths = {name: growth(moment, now) for name, moment in reading.past.items()}
    ever = growth_since_start(now)
    lately = growths.get(FINDINGS_WINDOW) or ever
    granularity = None
    if observation.contradiction is None:
        granularity = hit_granularity(snapshot, facts.decode_context_parallel_size.value)
    sessions = count_sessions(facts, prediction, observation, session_tokens, calibrated)
    ledger = make_ledger(facts, prediction, observation)
    if ledger is not None and calibrated is not None:
        ledger = with_calibrated(ledger, calibrated.prediction)
    windows = hit_windows(snapshot, facts.rules, growths)
    # A quiet engine finishes too few in the window: of all that it has ever finished a mean is known.
    few = mean_tokens(lately, "finished_prompt_tokens_total") is None
    lengths_of = ever if few else lately
    prompt = usual_tokens(lengths_of, _share_found(windows, snapshot))
    admission = Admission(
        snapshot=snapshot,
        now=now,
        facts=facts,
        observation=observation,
        recent=reading.recent,
        course=reading.five_minutes,
        need=Need(
            longest_blocks=_longest_blocks(facts, sessions),
            usual_tokens=prompt,
            usual_blocks=usual_blocks(facts, observation, prompt),
            prompt_blocks=usual_blocks(
                facts, observation, mean_tokens(lengths_of, "finished_prompt_tokens_total")
            ),
        ),
    )
    binding_limit = find_binding_limit(admission)
    return Assessment(
        facts=facts,
        snapshot=snapshot,
        taken_at=reading.taken_at,
        prediction=prediction,
        calibrated=calibrated,
        own_start=own_start,
        observation=observation,
        sessions=sessions,
        difference=compare(prediction, observation),
        ledger=ledger,
        occupancy=estimate_occupancy(snapshot, facts, observation, lately),
        hit_windows=windows,
        binding_limit=binding_limit,
        forecast=forecast(admission, binding_limit, lengths_of),
        states=find_states(admission, reading.past, growths, sessions),
        warmth=assess_warmth(
            facts,
            _tiers(reading, prediction, observation, ever),
            growths,
            sessions,
            idle_seconds=idle_seconds,
            granularity=granularity,
            reuse=reuse,
            host_use=reading.host_use,
        ),
        problems=(
            *_contradictions(snapshot, observation),
            *findings(snapshot, facts.rules, granularity, lately),
        ),
        last_hour=reading.last_hour,
        facts_at=reading.facts_at,
    )


def _tiers(reading: Reading, prediction: Prediction, observation: Observation, ever: Growth) -> Tiers:
    facts, snapshot = reading.facts, reading.snapshot
    caches = facts.flags.enable_prefix_caching
    return Tiers(
        snapshot=snapshot,
        observation=observation,
        layout=prediction.layout,
        planned=None if prediction.layout is None else _planned(facts, prediction.layout, snapshot.told_tier),
        since_start=ever,
        caches=_looks_up(snapshot) if caches is None else caches,
    )


def _planned(facts: EngineFacts, layout: KvLayout, told: ToldTier | None) -> OffloadTier | str | None:
    """The tier in host memory, where the engine does not tell another shape of its chunks than the flags do."""
    planned = plan_tier(facts, layout)
    if told is None or told.blocks_per_chunk is None or not isinstance(planned, OffloadTier):
        return planned
    if planned.blocks_per_chunk == told.blocks_per_chunk:
        return planned
    return (
        f"its chunks have {told.blocks_per_chunk} blocks, and by the flags that are known {planned.blocks_per_chunk}; "
        "say kv_transfer_config in full"
    )


def _looks_up(snapshot: EngineSnapshot) -> bool | None:
    """Whether prefixes are cached, where nobody says it: else nothing is ever looked up."""
    queries = snapshot.prefix_cache_queries_total
    return None if queries is None else queries > 0


def _longest_blocks(facts: EngineFacts, sessions: tuple[SessionCapacity, ...]) -> int | None:
    """Blocks of a request of max_model_len tokens."""
    longest = None if facts.max_model_len is None else facts.max_model_len.value
    return next((row.blocks_per_session for row in sessions if row.session_tokens == longest), None)


def _share_found(windows: tuple[HitWindow, ...], snapshot: EngineSnapshot) -> float | None:
    """Share of prompts found in the prefix cache of late; 0 where nothing is looked up."""
    told = next((window.local for window in windows if window.local is not None), None)
    if told is not None:
        return None if told.doubt else told.ratio
    return 0.0 if snapshot.prefix_cache_queries_total == 0 else None


def _contradictions(snapshot: EngineSnapshot, observation: Observation) -> tuple[PageProblem, ...]:
    if observation.contradiction is None:
        return ()
    detail = f"engine {snapshot.engine}: {observation.contradiction}"
    return (PageProblem(ProblemReason.CONTRADICTION, detail),)
