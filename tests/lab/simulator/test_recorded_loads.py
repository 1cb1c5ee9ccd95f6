"""The loads of a real vLLM, each with other flags, as the simulator makes them of their requests; docs/simulator.md has the figures.

`data_parallel` is not among them: the log does not say which engine got a request.
"""

from pathlib import Path

import pytest

from kvheadroom.lab.recordings import read_recording
from kvheadroom.lab.simulator.engine import EngineSettings
from kvheadroom.lab.simulator.rules import rules_of
from tests.lab.simulator.replayed import engine_of, episodes, grown, replay, usage_error

LOADS = Path(__file__).parents[2] / "recordings" / "loads"


@pytest.mark.parametrize(
    ("name", "error", "preemptions", "recorded_starts", "simulated_starts"),
    [
        ("aborts", 0.0224, (29, 30), [25.0], [25.0]),
        ("agentic", 0.0269, (3, 4), [76.5], [72.0]),
        ("burst", 0.0180, (110, 112), [14.0, 54.0, 86.5], [14.5, 54.0, 85.0]),
        ("latent", 0.0066, (15, 16), [19.5, 54.0], [19.5, 54.0]),
        ("long_prompts", 0.0393, (1, 1), [51.0], [51.0]),
        ("mixed_lengths", 0.0152, (4, 2), [90.0], [90.0]),
        ("prefix_reuse", 0.0194, (3, 2), [6.5, 68.5], [6.5]),
        ("ramp", 0.0362, (143, 154), [57.5, 106.9], [57.5, 106.9]),
        ("sequence_limit", 0.0061, (0, 0), [], []),
        ("spikes", 0.0002, (0, 0), [], []),
        ("steady", 0.0126, (0, 0), [], []),
    ],
)
def test_usage_and_preemptions_are_about_as_recorded(
    name: str,
    error: float,
    preemptions: tuple[int, int],
    recorded_starts: list[float],
    simulated_starts: list[float],
) -> None:
    recording = read_recording(LOADS / f"{name}.metrics.jsonl.gz")
    flags = recording.origin["flags"]
    first = engine_of(next(page for _, page in recording.pages()))
    assert first.num_blocks is not None
    assert first.block_size is not None
    settings = EngineSettings(
        num_blocks=first.num_blocks,
        block_size=first.block_size,
        max_model_len=flags["--max-model-len"],
        max_num_batched_tokens=flags["--max-num-batched-tokens"],
        max_num_seqs=flags["--max-num-seqs"],
        rules=rules_of(recording.origin["vllm_version"]),
        enable_prefix_caching=bool(first.echoed.enable_prefix_caching),
    )
    found, _ = replay(recording, LOADS / f"{name}.requests.jsonl.gz", settings)
    assert usage_error(found) == pytest.approx(error, abs=0.0001)
    recorded = grown([instant.recorded.preemptions_total for instant in found])
    simulated = grown([instant.simulated.preemptions_total for instant in found])
    assert (recorded[-1], simulated[-1]) == preemptions
    assert [round(start, 1) for start, _ in episodes(found, recorded)] == recorded_starts
    assert [round(start, 1) for start, _ in episodes(found, simulated)] == simulated_starts
