"""Makes the recordings in tests/recordings/loads and warm anew, each on a vLLM of its own: `make lab`, or one: `make lab PYTEST="-k burst"`."""

from pathlib import Path

import pytest

from tests.end_to_end.conftest import Progress
from tests.loads.claims import CLAIMS
from tests.loads.make import make
from tests.loads.measured import PAGES_SUFFIX, REQUESTS_SUFFIX, folder_of, measure, put_into_readme, row
from tests.loads.scenarios import SCENARIOS, Scenario


@pytest.mark.lab
@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda scenario: scenario.name)
def test_a_load_is_recorded_and_is_of_its_kind(
    scenario: Scenario, vllm_python: Path, tmp_path: Path, progress: Progress
) -> None:
    make(scenario, vllm_python, tmp_path, progress)
    measured = measure(scenario.name, tmp_path)
    progress(row(measured))
    # What is no recording of its kind does not take the place of one that is.
    CLAIMS[scenario.name](measured)
    for suffix in (PAGES_SUFFIX, REQUESTS_SUFFIX):
        name = f"{scenario.name}{suffix}"
        (folder_of(scenario) / name).write_bytes((tmp_path / name).read_bytes())
    put_into_readme(measured)
