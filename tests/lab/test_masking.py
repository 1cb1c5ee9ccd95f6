"""Masking: no name is left on a page, and what the page tells stays."""

import random
from dataclasses import replace

import pytest

from kvheadroom.capacity.readings import VllmPage
from kvheadroom.lab.masking import MAX_NAMES, Masks
from kvheadroom.sources.kept_lines import kept_lines
from kvheadroom.sources.vllm_metrics import parse_page
from tests.conftest import capture, capture_names

LORA = 'vllm:lora_requests_info{max_lora="4",running_lora_adapters="alice,acme-hr",waiting_lora_adapters="acme-hr"} 1.8e+09\n'


def read(text: str) -> VllmPage:
    page = parse_page(text.encode())
    assert isinstance(page, VllmPage)
    return page


@pytest.mark.parametrize("name", capture_names())
def test_a_masked_page_tells_the_same_of_each_engine_but_its_name(name: str) -> None:
    plain = kept_lines(capture(name))
    masked = Masks().mask_page(plain)
    assert "tiny" in plain
    assert "tiny" not in masked
    told, shown = read(plain), read(masked)
    assert shown.engines == tuple(
        replace(engine, model_name=engine.model_name and "model-1") for engine in told.engines
    )
    assert (shown.format, shown.metrics, shown.process_start_time_seconds) == (
        told.format,
        told.metrics,
        told.process_start_time_seconds,
    )


@pytest.mark.parametrize("name", capture_names())
def test_only_names_are_masked_on_a_page_of_vllm(name: str) -> None:
    masks = Masks()
    masks.mask_page(kept_lines(capture(name)))
    assert masks.num_lines_left_out == 0
    assert masks.names == {"model": {"tiny": "model-1"}}


def test_each_adapter_has_its_word_wherever_it_stands() -> None:
    masks = Masks()
    assert masks.mask_page(LORA) == (
        'vllm:lora_requests_info{max_lora="4",running_lora_adapters="adapter-1,adapter-2",'
        'waiting_lora_adapters="adapter-2"} 1.8e+09\n'
    )
    assert masks.mask_page('vllm:lora_requests_info{running_lora_adapters="acme-hr,7"} 1\n') == (
        'vllm:lora_requests_info{running_lora_adapters="adapter-2,adapter-3"} 1\n'
    )


@pytest.mark.parametrize(
    ("line", "masked"),
    [
        ('vllm:x{model_name="7"} 1', 'vllm:x{model_name="model-1"} 1'),
        ('vllm:x{model_name=""} 1', 'vllm:x{model_name=""} 1'),
        ('vllm:x{model_name="a\\"b,{c} \\n#"} 1', 'vllm:x{model_name="model-1"} 1'),
        ('vllm:x{path="/home/alice/m",engine="0"} 1', 'vllm:x{path="path-1",engine="0"} 1'),
        ('ray_vllm_x{NodeAddress="10.0.0.5",pid="12"} 1', 'ray_vllm_x{NodeAddress="NodeAddress-1",pid="12"} 1'),
        ('vllm:x{a_later_label="alice"} 1', 'vllm:x{a_later_label="a_later_label-1"} 1'),
        ('vllm:x_bucket{le="+Inf"} 1 # {trace_id="alice"} 0.5', 'vllm:x_bucket{le="+Inf"} 1'),
        ('vllm:x{reason="capacity"} NaN', 'vllm:x{reason="capacity"} NaN'),
        ("process_start_time_seconds 1.79599011022e+09", "process_start_time_seconds 1.79599011022e+09"),
        ("# TYPE vllm:x counter", "# TYPE vllm:x counter"),
    ],
)  # fmt: skip
def test_a_label_is_kept_only_if_its_values_are_known_to_be_no_names(line: str, masked: str) -> None:
    assert Masks().mask_page(f"{line}\n") == f"{masked}\n"


@pytest.mark.parametrize(
    "line",
    [
        "vllm:x alice",
        'vllm:x{model_name="alice} 1',
        'vllm:x{model_name="alice"',
        "vllm:x{alice} 1",
        "vllm:alice",
        "vllm:x 1 alice",
        "vllm:x 1\x0balice",
    ],
)
def test_a_line_that_is_no_sample_is_left_out_and_counted(line: str) -> None:
    masks = Masks()
    assert masks.mask_page(f"{line}\nvllm:y 1\n") == "vllm:y 1\n"
    assert masks.num_lines_left_out == 1


@pytest.mark.parametrize(
    "line", ["# HELP vllm:x of alice", "# TYPE vllm:x counter of alice", "# UNIT vllm:x alice"]
)
def test_comments_are_kept_only_where_they_are_needed(line: str) -> None:
    assert Masks().mask_page(f"{line}\n") == ""


def test_no_name_is_left_of_a_page_that_was_scrambled(seeded: random.Random) -> None:
    name = "Al1ce-Acme"
    page = kept_lines(capture("gqa_heavy")).replace("tiny", name) + LORA.replace("alice", name)
    for _ in range(200):
        characters = list(page)
        for _ in range(seeded.randrange(1, 40)):
            at = seeded.randrange(len(characters))
            characters[at] = seeded.choice(
                ['"', "{", "}", ",", "=", "\\", "\n", " ", "", "#", "x", "\u2028", "\x0c"]
            )
        assert name not in Masks().mask_page("".join(characters) + "\n")


def test_a_server_that_shows_names_without_end_fills_no_memory() -> None:
    masks = Masks()
    page = "".join(f'vllm:x{{model_name="m{i}"}} 1\n' for i in range(MAX_NAMES + 500))
    masked = masks.mask_page(page)
    assert len(masks.names["model"]) == MAX_NAMES
    assert masked.count('"model-other"') == 500


def test_words_go_on_where_an_earlier_recording_left_off() -> None:
    masks = Masks({"model": {"b": "model-1", "a": "model-2"}})
    assert [masks.word_for("model", name) for name in "abc"] == ["model-2", "model-1", "model-3"]
