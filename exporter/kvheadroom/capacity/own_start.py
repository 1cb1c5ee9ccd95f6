"""The start that an engine runs since: what it is called, and what it tells of the overhead."""

from dataclasses import dataclass

from kvheadroom.capacity.calibration_samples import CalibrationSample, Excluded, Exclusion


@dataclass(frozen=True, slots=True)
class OwnStart:
    """The present start of an engine. It has no say in the engine's own calibrated figure.

    Attributes:
        start: its name, as in a sample.
        told: the sample; or why it is none; or a sentence without its full stop, what is waited for before it is measured.
    """

    start: str
    told: CalibrationSample | Excluded | str

    @property
    def sample(self) -> CalibrationSample | None:
        """What it tells, None where it is none or not measured yet."""
        return self.told if isinstance(self.told, CalibrationSample) else None

    @property
    def excluded(self) -> Excluded | None:
        """Why it tells nothing, None where it does or is not measured yet."""
        return self.told if isinstance(self.told, Excluded) else None

    @property
    def why_alone(self) -> str:
        """Why there is no calibrated figure where no other start is known: a sentence without its full stop."""
        if isinstance(self.told, CalibrationSample):
            return (
                "no other start like it has been seen; its own start is kept and will be used at the next one"
            )
        if isinstance(self.told, str):
            return f"no other start like it has been seen, and its own is not measured yet: {self.told}"
        if self.told.reason in (Exclusion.POOL_BY_FLAG, Exclusion.UNKNOWN):
            return f"nothing can be learned of it: {self.told.detail}"
        return f"no other start like it has been seen, and its own is left out: {self.told.detail}"


def start_of(replica: str, engine: str, started_at: float | None, num_blocks: int | None) -> str:
    """What tells this start from every other.

    Args:
        started_at: start time of the server's process in unix seconds, None where its page does not tell it; then a restart
            into as many blocks is the same start.
    """
    when = f"{num_blocks} blocks" if started_at is None else f"{int(started_at)}"
    return f"{replica}/{engine}/{when}"


def without_replica(sample: CalibrationSample) -> object | None:
    """What two names of one start have in common where only the replica is called otherwise; None where its name has no start time."""
    names = sample.start.rsplit("/", 2)
    if len(names) < 3 or not names[-1].isdecimal():
        return None
    return (sample.key, *names[1:], sample.overhead_bytes)
