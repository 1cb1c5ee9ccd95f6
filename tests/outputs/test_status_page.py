"""The pages at `/` and `/engines/<id>`: what a person reads there."""

import re
from dataclasses import replace
from html.parser import HTMLParser

import pytest

from kvheadroom.capacity.assessment import Reading, assess
from kvheadroom.capacity.calibration_samples import Excluded, Exclusion
from kvheadroom.capacity.facts import OffloadFlags
from kvheadroom.capacity.fleet import FleetAssessment, withhold_stale
from kvheadroom.capacity.gpu_assignment import OthersMemory
from kvheadroom.capacity.own_start import OwnStart
from kvheadroom.capacity.readings import ToldTier
from kvheadroom.outputs.numbers import count, gigabytes, percent, seconds, signed, size, span
from kvheadroom.outputs.status_page import STYLE, render_engine, render_fleet
from tests.conftest import Golden
from tests.outputs.fleet import NOW, calibrated, fleet, inflated, offloading, on_a_gpu, replica
from tests.outputs.pages import all_pages


class _Text(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.words: list[str] = []
        self.open: list[str] = []

    def handle_starttag(self, tag: str, attrs: object) -> None:
        if tag not in ("meta", "br", "link", "input"):
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if "style" not in self.open:
            self.words += data.split()


def words(notice: str | None = None, shown: FleetAssessment | None = None) -> str:
    return words_of(all_pages(withhold_stale(shown or fleet(), NOW), NOW, notice))


def words_of(html: str) -> str:
    parser = _Text()
    parser.feed(html)
    assert parser.open == []
    return " ".join(parser.words)


def without_style(html: str) -> str:
    """A page without the style sheet that all have."""
    assert html.count(STYLE) == 1
    return html.replace(STYLE, "")


def test_the_page_is_as_committed(golden: Golden) -> None:
    shown = withhold_stale(fleet(), NOW)
    golden.check("fleet.html", without_style(render_fleet(shown, NOW, None)))
    for name in ("gqa:0", "hbm:0", "offload:0", "down:"):
        page = render_engine(shown, NOW, None, name)
        golden.check(f"engine_{name.rstrip(':0')}.html", without_style(page.html))


def test_predicted_observed_and_difference_stand_side_by_side() -> None:
    page = words(shown=FleetAssessment((replica("gqa", "gqa_idle_fresh"),)))
    assert "tokens 4,096 4,096 0" in page
    assert "blocks (with the null block) 128 128 0" in page
    assert "bytes per GPU 4.00 MiB 4.00 MiB 0 B" in page
    assert "1,024 tokens 4 4 0 3 32" in page
    assert "+0.00 %" in page


def test_what_binds_and_the_states_of_an_engine_stand_with_their_numbers() -> None:
    page = words(shown=FleetAssessment((fleet().replicas[0],)))
    assert "thrash. 24 preemptions in a minute, and <26> requests are there." in page
    assert "What binds: not known. 9 requests wait at the first scrape; the next one tells" in page
    # Nobody waits: nothing to say.
    assert "What binds" not in words(shown=FleetAssessment((replica("gqa", "gqa_light_steady"),)))


def test_hits_of_each_window_stand_with_their_tokens_and_a_doubt_with_its_reason() -> None:
    page = words(shown=FleetAssessment((fleet().replicas[5],)))
    assert "Prompt tokens found last 1m in the prefix cache 0.0 % 0 of 11,520" in page
    assert "by the KV connector, of the rest 66.7 % 7,680 of 11,520" in page
    assert "(!)" not in page
    page = words(shown=FleetAssessment((inflated(),)))
    assert "inflated_by_recompute. engine 0: 89 preemptions in the last 5 minutes" in page
    assert re.search(r"in the prefix cache \d+\.\d % \(!\) ", page)
    assert (
        "(!) this vLLM counts what a preempted request finds again of its own tokens as prefix hits" in page
    )


def test_what_tokens_fill_is_told_beside_what_blocks_are_in_use_as_an_estimate() -> None:
    page = words(shown=FleetAssessment((fleet().replicas[2],)))
    assert "KV pool in use 60.6 % room left, 77 of 127 blocks; tokens fill about 55.7 % (estimate; " in page


def test_of_several_engines_the_fullest_stands_beside_the_mean() -> None:
    dp2 = fleet().replicas[1]
    full, idle = (
        replace(one, snapshot=replace(one.snapshot, kv_usage_ratio=usage))
        for one, usage in zip(dp2.engines, (0.9, 0.2), strict=True)
    )
    page = words(shown=FleetAssessment((replace(dp2, engines=(full, idle)),)))
    assert "2 engines, a pool each: the fullest is 90.0 % in use, the mean is 55.0 %." in page
    # Of one engine there is nothing to compare.
    assert "a pool each" not in words(shown=FleetAssessment((fleet().replicas[0],)))


def test_a_pool_of_which_no_size_is_told_is_unknown_with_its_reason_and_no_zero() -> None:
    hub = fleet().replicas[2]
    (engine,) = hub.engines
    untold = replace(engine.snapshot, num_blocks=None, pool_tokens=None, max_concurrency=None)
    again = assess(Reading(facts=engine.facts, snapshot=untold, taken_at=engine.taken_at), (1024,))
    shown = FleetAssessment((replace(hub, engines=(again,)),))
    page = words(shown=shown)
    assert (
        "Capacity unknown: the server's page does not tell how many blocks the pool has; none does before"
        in page
    )
    assert "– of – blocks" in page
    assert "Capacity unknown" not in words(shown=FleetAssessment((hub,)))


def test_what_was_learned_stands_between_predicted_and_observed_with_how_it_is_known() -> None:
    assert "<td>75,769,344</td><td>75,314,944</td><td>73,600,000</td>" in all_pages(fleet(), NOW)
    text = words()
    assert "the overhead is learned from 3 starts like it (1.05 to 1.15 GB). Its own start has no say" in text
    assert "It is left out of what the next one is told: 72.80 GiB of overhead are more than half of" in text
    assert "it would be more than the weights leave, and was cut to that. Its own start has no say" in text
    assert "No pool is left with it: weights (0.00 GB per GPU) and overhead (78.22 GB) leave nothing" in text
    assert "Not calibrated" not in text


@pytest.mark.parametrize(
    ("told", "sentence"),
    [
        (None, "its own start is kept and will be used at the next one"),
        ("version is down", "its own is not measured yet: version is down"),
        (Excluded(Exclusion.ASLEEP, "it sleeps"), "its own is left out: it sleeps"),
        (
            Excluded(Exclusion.POOL_BY_FLAG, "a flag gives the pool"),
            "nothing can be learned of it: a flag gives the pool",
        ),
    ],
)
def test_where_nothing_was_learned_the_page_tells_why(told: Excluded | str | None, sentence: str) -> None:
    alone = calibrated(on_a_gpu(), "alone")
    if told is not None:
        own = OwnStart("alone/0/1", told)
        alone = replace(alone, engines=(replace(alone.engines[0], own_start=own),))
    text = words(shown=FleetAssessment((alone,)))
    assert re.search(f"Not calibrated: [^.]*{re.escape(sentence)}\\.", text)
    assert "KV pool predicted observed" in text


def test_the_prediction_shows_its_work() -> None:
    page = words(shown=FleetAssessment((replica("gqa", "gqa_idle_fresh"),)))
    assert "LlamaForCausalLM: 4 × full attention in blocks of 32 tokens, 32,768 B" in page
    assert "a block of the pool takes 32,768 B; each further token of a context 1,024 B per GPU" in page
    assert "kv_cache_memory_bytes: +4,194,304 B (echoed by the engine)" in page
    assert "÷ 64 blocks per request of max_model_len (2,048 tokens) = 2.0000 requests = 4,096 tokens" in page
    assert "tensor_parallel_size 1 (vLLM's default)" in page


def test_a_missing_fact_comes_with_its_way_out_and_is_escaped() -> None:
    html = all_pages(fleet(), NOW)
    assert "org/&lt;b&gt;tiny&lt;/b&gt;" in html
    assert "<b>tiny</b>" not in html
    assert "Way out: set `model: /path`" in words()


def test_a_replica_that_is_down_says_why_and_shows_no_old_numbers() -> None:
    page = words(shown=FleetAssessment((fleet().replicas[3],)))
    assert "metrics down: refused. GET http://down:8000/metrics: nothing listens there" in page
    assert "older than three scrapes" in page
    assert "blocks" not in page


def test_a_config_with_a_fault_is_said_on_top() -> None:
    assert "The config file has a fault; the config before it is in use." in words()
    assert "/etc/kvheadroom.yaml: replicas[0].url: no" in words()


def test_gpus_stand_with_the_replica_they_serve_and_the_others_by_themselves() -> None:
    html = all_pages(fleet(), NOW)
    assert "NVIDIA &lt;A100&gt;" in html
    page = words()
    assert "GPU-aaaaaaaa Xid 79 × 2 140.40 GiB 601.00 MiB 126.96 GiB – 12.86 GiB" in page
    assert (
        "GPU-aaaaaaaa Xid 79 × 2 140.40 GiB 601.00 MiB 126.96 GiB 5.00 GiB 12.86 GiB Its processes are on"
        in page
    )
    assert "MIG-dddddddd, instance 5/0 of GPU-dddddddd 32.25 GiB 24.00 MiB" in page
    assert "Its GPUs are not known: new is not known to be this machine." in page
    # In the table, and in the sentence on what is on it, of both replicas.
    assert page.count("GPU-aaaaaaaa") == 4
    assert (
        "GPU-aaaaaaaa: what is on it is not known term by term: 2 replicas run on it, and which memory is whose is not known."
        in page
    )
    assert (
        "GPU-12121212: reserved 551.00 MiB + others 1.00 MiB + weights 3.88 MiB + kv pool 70.19 GiB + rest 2.80 GiB"
        in page
    )
    assert "+ free 6.11 GiB = 79.65 GiB." in page
    alone = words_of(render_fleet(withhold_stale(fleet(), NOW), NOW, None))
    alone = alone[alone.index("GPUs of this machine") :]
    assert "lost. GPU 2 fell off the bus; Xid 31 × 1 since kvheadroom's start" in alone
    assert "not here. GPU-eeeeeeee of dp2's gpus is not on this machine." in alone
    assert "GPU-ffffffff is in MIG mode, and no MIG device of it can be read." in alone
    assert "GPU-10101010 120.00 GiB the host's memory 20.00 GiB 100.00 GiB" in alone
    assert "GPU-bbbbbbbb 80.00 GiB in used 7.00 MiB 79.99 GiB" in alone
    assert "GPU-aaaaaaaa" not in alone


def test_the_memory_of_a_gpu_is_a_sum_in_words_from_the_box_to_the_pool() -> None:
    page = words(shown=FleetAssessment((fleet().replicas[6],), gpus=fleet().gpus))
    begin = page.index("Memory of one GPU predicted")
    # Learned are 1.1 GB (1.02 GiB) of overhead: the 78,226,585,027 B of the budget, less them and 4,065,536 B of weights, are
    # 2,353,592 blocks of 32,768 B (71.83 GiB) and 16,835 B.
    assert page[begin:].startswith(
        "Memory of one GPU predicted may be calibrated live difference how it is known "
        "as sold 80 GB GB on the box "
        "as its driver counts 79.65 GiB NVML, with what it reserves "
        "CUDA's total 79.19 GiB 85.03 GB 79.19 GiB assumed; vLLM budgets with it "
        "less outside utilization 6.34 GiB not known 6.34 GiB 6.34 GiB 0 assumed: utilization echoed by the engine, CUDA's total assumed; live: as predicted "
        "less weights 3.88 MiB exact 3.88 MiB 3.88 MiB 0 derived: tensor by tensor, by config.json; live: as predicted "
        "less overhead 605.28 MiB 0 B to 1.54 GiB 1.02 GiB 2.66 GiB +2.07 GiB assumed: estimated; live: what the pool leaves, with the rounding "
        "of it context 256.00 MiB of it activations 32.00 MiB of it cuda graphs 317.28 MiB "
        "of it unexplained +2.07 GiB live less predicted; 32,767 B of it may be rounding; live less calibrated is +1.64 GiB "
        "less block rounding 29,154 B 0 B to 32,767 B 16,835 B – – derived: less than one block "
        "= kv pool 72.26 GiB 71.31 GiB to 72.85 GiB 71.83 GiB 70.19 GiB -2.07 GiB derived: 2,367,792 blocks; live: 2,300,000 blocks "
        "Predicted, to the byte taken off bytes left CUDA's total 85,028,896,768 outside utilization 6,802,311,741 78,226,585,027 "
        "weights 4,065,536 78,222,519,491 overhead 634,682,081 77,587,837,410 block rounding 29,154 77,587,808,256 kv pool 77,587,808,256 0 "
        "Calibrated, to the byte"
    )
    assert (
        "Pool above demand, 70.16 GiB: 16 requests (max_num_seqs) of max_model_len tokens fill 1,024 of"
        in page
    )
    assert "Way out: --kv-cache-memory-bytes 33587200 (vLLM 0.11 and later) gives them back" in page


def test_a_finding_about_a_gpu_names_it_beside_its_replica() -> None:
    shown = fleet()
    assert shown.gpus is not None
    others = (OthersMemory("GPU-12121212", "hbm", 7 * 2**30, 66 * 2**30),)
    runs = replace(shown.gpus.runs, others=others)
    page = words(shown=replace(shown, gpus=replace(shown.gpus, runs=runs)))
    assert "Foreign memory on GPU-12121212, 7.00 GiB: other processes hold 7.00 GiB" in page
    assert "Foreign memory" not in words()


def test_states_and_events_are_told_in_words() -> None:
    page = words()
    assert page.count("The server · serving") == 7
    assert "The server · down http://down:8000" in page
    assert "2 events, the latest 90 s ago: engine 0: pool 64 blocks of 32 -> 128 blocks of 32" in page
    assert "90 s ago: restarted: its process started anew" in page


def test_a_replay_is_said_on_the_page() -> None:
    assert "This is a replay" in words(notice="This is a replay")
    assert "replay" not in words()


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (count(None), "–"),
        (count(1234567), "1,234,567"),
        (count(3.0), "3"),
        (count(1.5625), "1.56"),
        (signed(-5), "-5"),
        (signed(0), "0"),
        (signed(2048), "+2,048"),
        (percent(0.97637), "97.6 %"),
        (percent(None), "–"),
        (size(4 * 2**20), "4.00 MiB"),
        (size(3 * 2**30 // 2), "1.50 GiB"),
        (size(999), "999 B"),
        (gigabytes(180e9), "180 GB"),
        (gigabytes(191_514_017_792), "191.51 GB"),
        (seconds(0.0153), "15 ms"),
        (seconds(61.4), "61 s"),
        (seconds(None), "never"),
    ],
)
def test_numbers_are_written_for_people(text: str, expected: str) -> None:
    assert text == expected


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (None, "–"), (0.25, "250 ms"), (3.5, "3.5 s"), (300.0, "5 min"), (2700.0, "45 min"), (7560.0, "2.1 h"),
        (259_200.0, "3 days"), (86_400.0 * 999, "999 days"), (86_400.0 * 1000, "1,000 days"), (86_400.0 * 1_234_567, "1,234,567 days"),
    ],
)  # fmt: skip
def test_how_long_something_lasts_is_written_for_people(value: float | None, expected: str) -> None:
    assert span(value) == expected


def test_a_tier_that_the_engine_alone_tells_of_is_shown_before_anything_was_measured() -> None:
    told = offloading()
    (engine,) = told.engines
    tier = ToldTier(num_chunks=0, blocks_per_chunk=1, size_bytes=0, size_tokens=0)
    reading = Reading(
        facts=replace(engine.facts, offload=OffloadFlags()),
        snapshot=replace(engine.snapshot, told_tier=tier),
        taken_at=engine.taken_at,
    )
    shown = FleetAssessment(replicas=(replace(told, engines=(assess(reading, (1024,)),)),))
    assert "not one chunk fits in the tier in host memory; make it larger." in words(shown=shown)
