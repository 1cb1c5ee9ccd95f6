"""Which releases of vLLM's scheduler are simulated."""

from kvheadroom.capacity.errors import OperatorError
from kvheadroom.capacity.scheduler_rules import RELEASES, SchedulerRules, scheduler_rules


def rules_of(version: str) -> SchedulerRules:
    """The rules of a release such as `0.33.0`.

    Raises:
        OperatorError: the release is older than what is simulated, or no release.
    """
    numbers = version.partition("+")[0].split(".")
    if len(numbers) < 3 or not all(number.isdecimal() for number in numbers[:3]):
        raise OperatorError(f"{version!r} is no release of vLLM; give one such as 0.33.0")
    asked = (int(numbers[0]), int(numbers[1]), int(numbers[2]))
    if asked < RELEASES[0].since:
        raise OperatorError(f"vLLM {version} is not simulated: its scheduler was read from 0.10.2 on")
    return scheduler_rules(asked)
