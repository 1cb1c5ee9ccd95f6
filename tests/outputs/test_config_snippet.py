"""The lines for the config that the page of an engine has: YAML that the config takes as it stands."""

from dataclasses import replace
from typing import Any

import pytest
import yaml

from kvheadroom.capacity.assessment import Assessment
from kvheadroom.capacity.known_facts import ConfigLine, LineKind, config_lines
from kvheadroom.config import ReplicaTemplate, validate_config
from kvheadroom.outputs.config_snippet import config_snippet
from tests.outputs.fleet import fleet, replica

ONE = replica("gqa", "gqa_idle_fresh")


def snippet_of(name: str, source: str = "config") -> str:
    (told,) = (one for one in fleet().replicas if one.replica == name)
    engine: Assessment = told.engines[0]
    return config_snippet(told, source, config_lines(engine.facts))


@pytest.mark.parametrize("name", ["gqa", "dp2", "hbm", "tight", "offload"])
def test_lines_are_taken_by_the_config_as_they_stand(name: str) -> None:
    text = snippet_of(name)
    config = validate_config(yaml.safe_load(text), "the page")
    assert [(one.replica, one.url) for one in config.replicas] == [(name, f"http://{name}:8000")]
    assert config.replicas[0].flags.tensor_parallel_size == 1


def test_what_is_missing_is_refused_until_it_is_filled_in_and_has_its_reason() -> None:
    text = snippet_of("hub")
    assert "  # missing: the server names its model 'org/<b>tiny</b>'\n  model: /path/to/the/model\n" in text
    lines = (ConfigLine("gpu", "NAME", is_flag=False, kind=LineKind.FILL_IN, why="nobody said it"),)
    with pytest.raises(Exception, match="'NAME' is not in the catalogue"):
        validate_config(yaml.safe_load(config_snippet(ONE, "config", lines)), "the page")


def test_an_estimate_stands_as_a_comment() -> None:
    text = snippet_of("hbm")
    assert "  # if you know better: 85028896768 (" in text
    assert "\n  # hbm_bytes: 85028896768\n" in text
    assert "hbm_bytes" not in yaml.safe_load(text)["replicas"][0]


def test_of_a_replica_of_a_list_the_lines_are_those_of_its_list() -> None:
    text = snippet_of("hbm", "file_sd_configs[0]")
    assert text.startswith("# under `replica:` of file_sd_configs[0]\n")
    settings: dict[str, Any] = yaml.safe_load(text)
    assert ReplicaTemplate.model_validate(settings).flags.dtype == "auto"


def test_what_somebody_else_wrote_forges_no_line() -> None:
    name = 'a": b\n- url: http://evil\u2028\x85\U0001f600'
    lines = (
        ConfigLine("model", name, is_flag=False, kind=LineKind.CONFIRM, why=f"{name}\nweights_bytes: 1"),
        ConfigLine("dtype", "auto", is_flag=True, kind=LineKind.CONFIRM, why=name),
    )
    told = yaml.safe_load(config_snippet(replace(ONE, replica=name), "config", lines))
    assert told == {
        "replicas": [{"url": "http://gqa:8000", "name": name, "model": name, "flags": {"dtype": "auto"}}]
    }


def test_flags_of_which_none_is_sure_are_a_comment_as_a_whole() -> None:
    lines = (ConfigLine("block_size", 16, is_flag=True, kind=LineKind.IF_KNOWN, why="16"),)
    text = config_snippet(ONE, "config", lines)
    assert text.endswith("  # flags:\n  #   if you know better: 16\n  #   block_size: 16\n")
    assert yaml.safe_load(text) == {"replicas": [{"url": "http://gqa:8000", "name": "gqa"}]}


def test_a_number_that_nobody_knows_has_its_place() -> None:
    line = ConfigLine("max_num_seqs", None, is_flag=True, kind=LineKind.IF_KNOWN, why="not known")
    assert config_snippet(ONE, "config", (line,)).endswith("#   max_num_seqs: N\n")


def test_without_anything_to_say_there_are_no_lines() -> None:
    assert config_snippet(ONE, "config", ()) == ""
