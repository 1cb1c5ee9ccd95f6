"""The simulated page beside a real one: it says less, and nothing that vLLM does not say."""

import gzip
import re
from pathlib import Path

from kvheadroom.lab.recording_lines import series_of
from kvheadroom.lab.simulator.engine import EngineSettings
from kvheadroom.lab.simulator.meters import HISTOGRAMS
from kvheadroom.lab.simulator.page import Pages
from kvheadroom.lab.simulator.request_log import LoggedArrivals, LoggedRequest
from kvheadroom.lab.simulator.rules import rules_of
from kvheadroom.lab.simulator.run import Run
from kvheadroom.lab.simulator.speeds import ConstantRates

CAPTURE = Path(__file__).parents[2] / "recordings" / "captures" / "gqa_heavy.metrics.gz"
SETTINGS = EngineSettings(
    num_blocks=128,
    block_size=32,
    max_model_len=2048,
    max_num_batched_tokens=512,
    max_num_seqs=64,
    rules=rules_of("0.32.0"),
)


def simulated() -> str:
    log = [
        LoggedRequest(
            session=str(number), turn=0, sent_at=0.0, prompt_tokens=200, output_tokens=100, max_tokens=100
        )
        for number in range(25)
    ]
    speed = ConstantRates(prefill_tokens_per_second=4000.0, decode_tokens_per_second=50.0)
    run = Run(SETTINGS, LoggedArrivals(log, 32), speed, starts_at=0.0)
    run.advance(100.0)
    return Pages(SETTINGS, model_name="tiny", starts_at=0.0).text(run)


def series(page: str) -> set[str]:
    return {found for line in page.split("\n") if (found := series_of(line)) is not None}


def labels(page: str) -> set[str]:
    line = next(line for line in page.split("\n") if line.startswith("vllm:cache_config_info{"))
    return set(re.findall(r'(\w+)="', line))


def test_every_series_stands_on_a_real_page_too() -> None:
    real, ours = gzip.decompress(CAPTURE.read_bytes()).decode(), simulated()
    info = "vllm:cache_config_info{"
    strange = {one for one in series(ours) - series(real) if not one.startswith(info)}
    assert strange == set()
    assert labels(ours) < labels(real)
    types = {line for line in ours.split("\n") if line.startswith("# TYPE")}
    assert types <= set(real.split("\n"))


def test_histograms_have_all_of_vllms_buckets() -> None:
    real, ours = gzip.decompress(CAPTURE.read_bytes()).decode(), simulated()
    for name in HISTOGRAMS:
        own = {one for one in series(real) if one.startswith((f"vllm:{name}_bucket{{", f"vllm:{name}_sum{{"))}
        assert own
        assert own <= series(ours), name


def test_what_a_histogram_counts_lies_in_its_bucket() -> None:
    page = simulated().split("\n")
    for series, value in (
        ('request_prompt_tokens_bucket{engine="0",le="100.0",model_name="tiny"}', 0.0),
        ('request_prompt_tokens_bucket{engine="0",le="200.0",model_name="tiny"}', 25.0),
        ('request_prompt_tokens_bucket{engine="0",le="+Inf",model_name="tiny"}', 25.0),
        ('request_prompt_tokens_sum{engine="0",model_name="tiny"}', 25 * 200.0),
        ('request_generation_tokens_count{engine="0",model_name="tiny"}', 25.0),
        ('generation_tokens_total{engine="0",model_name="tiny"}', 25 * 100.0),
        ('request_success_total{engine="0",finished_reason="length",model_name="tiny"}', 25.0),
    ):
        assert f"vllm:{series} {value}" in page
