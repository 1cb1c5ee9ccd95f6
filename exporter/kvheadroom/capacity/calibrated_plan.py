"""A planned start with the overhead that was learned from other starts, beside the raw one, which stays as it is."""

from collections.abc import Iterator
from dataclasses import dataclass, replace

from kvheadroom.capacity.calibration import Calibration, LearnedOverhead, with_overhead
from kvheadroom.capacity.calibration_key import CalibrationKey, key_of
from kvheadroom.capacity.deployment import DeploymentPlan, Outcome, plan_deployment
from kvheadroom.capacity.facts import Fact, Origin
from kvheadroom.capacity.plan_figures import Figure, figures
from kvheadroom.capacity.release_rules import parse_release

MOST_NAMED = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class IntervalFit:
    """Sessions of one length; `fewest` to `most` over the interval of the overhead, 0 where it leaves no room."""

    session_tokens: int
    sessions: float
    whole_sessions: int
    fewest: float
    most: float


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedInterval:
    """One start over an interval of the overhead.

    Attributes:
        fewest, most: with the highest and with the lowest overhead of the interval; `plan` itself where there is none.
    """

    plan: DeploymentPlan
    fewest: DeploymentPlan
    most: DeploymentPlan

    @property
    def is_sure(self) -> bool:
        """Whether both ends of the interval say the same."""
        return len({one.outcome is Outcome.STARTS for one in (self.fewest, self.plan, self.most)}) == 1

    @property
    def fits(self) -> tuple[IntervalFit, ...]:
        """One for each length of which sessions are counted at the most."""
        own = {fit.session_tokens: fit for fit in self.plan.fits}
        fewest = {fit.session_tokens: fit.sessions for fit in self.fewest.fits}
        return tuple(
            IntervalFit(
                session_tokens=fit.session_tokens,
                sessions=own[fit.session_tokens].sessions if fit.session_tokens in own else 0.0,
                whole_sessions=own[fit.session_tokens].whole_sessions if fit.session_tokens in own else 0,
                fewest=fewest.get(fit.session_tokens, 0.0),
                most=fit.sessions,
            )
            for fit in self.most.fits
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class CalibratedPlan(PlannedInterval):
    """One start with a learned overhead."""

    learned: LearnedOverhead

    @property
    def starts(self) -> bool:
        """Whether vLLM starts with the learned overhead."""
        return self.plan.outcome is Outcome.STARTS

    @property
    def tokens(self) -> tuple[int, int, int]:
        """Pool tokens of one engine: with the learned overhead, the fewest, the most; 0 where there is no room."""
        return (_tokens(self.plan), _tokens(self.fewest), _tokens(self.most))


def _tokens(plan: DeploymentPlan) -> int:
    return 0 if plan.pool is None else plan.pool.pool_tokens or 0


def calibrate(plan: DeploymentPlan, calibration: Calibration) -> CalibratedPlan | str:
    """The same start with what was learned; a string says why nothing is.

    A release that nobody said is that of the plan's rules.
    """
    if plan.outcome is Outcome.REFUSED:
        return "vLLM refuses it, whatever the overhead is"
    if plan.outcome is Outcome.UNKNOWN:
        return plan.reason
    facts = plan.facts
    if not facts.pool_from_hbm:
        return "the pool is of a given size, which no overhead changes"
    if facts.version is None:
        facts = replace(facts, version=Fact(_release(calibration, facts.rules.taken_from), Origin.ASSUMED))
    learned = calibration.learned(facts) or calibration.carried(facts)
    if learned is None:
        key = key_of(facts)
        return key if isinstance(key, str) else _nothing(calibration, key)

    def with_bytes(overhead: int) -> DeploymentPlan:
        one = replace(learned, overhead_bytes=overhead)
        return plan_deployment(plan.request, with_overhead(plan.facts, one))

    return CalibratedPlan(
        learned=learned,
        plan=with_bytes(learned.overhead_bytes),
        fewest=with_bytes(learned.high_bytes),
        most=with_bytes(learned.low_bytes),
    )


def _release(calibration: Calibration, rules: tuple[int, ...]) -> str:
    """The newest release that was measured of those that have these rules."""
    told = {key.release: parse_release(key.release) or () for key in calibration.samples}
    measured = [name for name, parts in told.items() if parts[: len(rules)] == rules]
    return max(measured, key=lambda name: told[name], default=".".join(map(str, rules)))


def _nothing(calibration: Calibration, key: CalibrationKey) -> str:
    """Why nothing fits, with the nearest that there is."""
    if not calibration.samples:
        return "no start was measured yet"
    architecture = key.geometry.partition(" ")[0]
    same = [one for one in calibration.samples if one.geometry == key.geometry]
    elsewhere = [one for one in same if one.weight_format == key.weight_format]
    if elsewhere:
        return (
            f"what was measured is of another GPU or release, and is not carried over ({_named(calibration, elsewhere)}): the estimate alone is "
            "nearer there"
        )
    alike = [one for one in calibration.samples if one.geometry.partition(" ")[0] == architecture]
    if same:
        return f"nothing was learned of this model as {key.weight_format}; there are starts of {_named(calibration, same)}"
    if alike:
        return f"nothing was learned of this {architecture}; there are starts of others: {_named(calibration, alike)}"
    models = sorted({sample.model for samples in calibration.samples.values() for sample in samples})
    shown = ", ".join(models[:MOST_NAMED]) + (
        f" and {len(models) - MOST_NAMED} more" if models[MOST_NAMED:] else ""
    )
    return f"nothing was learned of this {architecture}; there are starts of {shown}"


def _named(calibration: Calibration, keys: list[CalibrationKey]) -> str:
    def named(key: CalibrationKey) -> str:
        samples = calibration.samples[key]
        starts = "1 start" if len(samples) == 1 else f"{len(samples)} starts"
        return f"{samples[-1].model or key.geometry} ({key.weight_format}, {key.gpu}, {key.parallelism}, vLLM {key.release}, {starts})"

    more = f" and {len(keys) - MOST_NAMED} more" if keys[MOST_NAMED:] else ""
    return "; ".join(map(named, keys[:MOST_NAMED])) + more


def calibrated_figures(raw: DeploymentPlan, calibrated: CalibratedPlan) -> Iterator[Figure]:
    """Every figure that the learned overhead makes another, and where it may lie."""
    learned = calibrated.learned
    before = {figure.name: figure.value for figure in figures(raw)}
    for figure in figures(calibrated.plan):
        if before.get(figure.name) == figure.value:
            continue
        yield figure if figure.name != "overhead" else replace(figure, how=learned.note)
    _, fewest, most = calibrated.tokens
    yield Figure(
        name="kv_cache_size_tokens, where it may lie",
        value=f"{fewest:,} to {most:,}",
        unit="tokens",
        how=f"with {learned.high_bytes:,} B and with {learned.low_bytes:,} B of overhead",
        source="the interval of what was learned",
    )
