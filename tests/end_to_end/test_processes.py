"""A real vLLM found in this machine's process table, with nothing said about it."""

import subprocess
from pathlib import Path

from kvheadroom.sources.vllm_processes import VllmProcesses
from tests.daemon import COMMAND, daemon, wait_for
from tests.end_to_end.vllm_server import VllmServer
from tests.test_daemon import config_file

PREDICTED = "kvheadroom_predicted_pool_tokens"


def test_a_real_server_is_found_and_predicted_to_the_token_with_nothing_said_about_it(
    tiny_gqa_server: VllmServer, tmp_path: Path
) -> None:
    replica = tiny_gqa_server.host_and_port
    found = [one for one in VllmProcesses().scan().found if one.base_url == tiny_gqa_server.base_url]
    assert [one.server.pid for one in found] == [tiny_gqa_server.pid]
    assert found[0].server.command_line.is_whole
    with daemon("serve", "--config", config_file(tmp_path, "process_discovery: {}")) as serve:
        wait_for(lambda: serve.value(PREDICTED, replica=replica), "its prediction", seconds=60)
        said = tiny_gqa_server.startup_log_capacity().pool_tokens
        assert serve.value(PREDICTED, replica=replica) == said
        assert serve.value("kvheadroom_observed_pool_tokens", replica=replica) == said
        # Its command line was read whole, so what it leaves out is no assumption.
        assumed = serve.metrics().get("kvheadroom_assumed_fact", [])
        assert [labels["fact"] for labels, _ in assumed if labels["replica"] == replica] == []
        status = serve.get("/api/v1/status").json()
        (one,) = (each for each in status["replicas"] if each["replica"] == replica)
        facts = one["engines"][0]["facts"]
        assert facts["model_folder"]["value"] == str(tiny_gqa_server.model_folder)
        assert facts["flags"]["max_num_batched_tokens"] == {"value": "512", "origin": "its command line"}
        assert facts["flags"]["kv_cache_memory_bytes"]["origin"] == "echoed by the engine"
        assert (facts["platform"]["value"], facts["platform"]["origin"]) == ("cpu", "this machine")
    run = subprocess.run([*COMMAND, "check"], capture_output=True, text=True, check=False, timeout=120)
    _, _, told = run.stdout.partition(f"replica {replica} ")
    assert f"predicted {said:,} tokens, observed {said:,}, difference 0" in told.partition("\n\n")[0]


def test_a_real_server_with_several_api_servers_and_engines_is_found_as_one(
    tiny_dp2_server: VllmServer,
) -> None:
    found = [one for one in VllmProcesses().scan().found if one.base_url == tiny_dp2_server.base_url]
    assert [one.server.pid for one in found] == [tiny_dp2_server.pid]
    line = found[0].server.command_line
    assert (line.flags["data_parallel_size"], line.is_whole) == (2, True)
