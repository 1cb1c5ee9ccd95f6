"""Models whose layers do not all hold every token, on a real vLLM: predicted to the block as well."""

from pathlib import Path

import pytest

from tests.daemon import daemon, wait_for
from tests.end_to_end.conftest import Progress
from tests.end_to_end.test_main_job import status_of
from tests.end_to_end.tiny_model import write_model
from tests.end_to_end.vllm_server import VllmServer

POOL_BYTES = 16 * 1024 * 1024
FLAGS: dict[str, str | int | float | bool] = {
    "--load-format": "dummy",
    "--dtype": "bfloat16",
    "--enforce-eager": True,
    "--max-model-len": 2048,
    "--kv-cache-memory-bytes": POOL_BYTES,
    "--max-num-batched-tokens": 512,
}
# For each model: bytes of a block, and blocks of one request of 2,048 and of 640 tokens.
#
# windows: six groups of one layer, 128 tokens x 256 B. A window holds 255 tokens and one batch of 512 (a CPU schedules
# none ahead), so ceil(767 / 128) + 1 = 7 blocks, five times, beside 16 of the full layer; with 640 tokens 6, five times,
# and 5.
# hybrid: one group of attention, and three of a state each, of which a request keeps two: 16 + 6, and 5 + 6.
EXPECTED = {"windows": (32_768, 51, 35), "hybrid": (32_768, 22, 11)}


@pytest.mark.parametrize("model", EXPECTED)
def test_a_model_of_another_kind_is_predicted_to_the_block(
    model: str, vllm_python: Path, tmp_path: Path, progress: Progress
) -> None:
    block_bytes, longest, shorter = EXPECTED[model]
    blocks = POOL_BYTES // block_bytes
    with VllmServer(
        vllm_python, write_model(tmp_path / model, model), FLAGS, tmp_path / "vllm.log", progress=progress
    ) as vllm:
        said = vllm.startup_log_capacity()
        assert said.pool_tokens == int(blocks / longest * 2048)
        config = tmp_path / "kvheadroom.yaml"
        config.write_text(
            "session_tokens: [640]\n"
            f"replicas: [{{url: {vllm.base_url}, name: odd, gpu: CPU, flags: {{max_num_batched_tokens: 512}}}}]\n"
        )
        with daemon("serve", "--config", config) as serve:
            wait_for(
                lambda: serve.value("kvheadroom_predicted_pool_tokens") == said.pool_tokens, "the prediction"
            )
            for origin in ("predicted", "observed"):
                assert serve.value(f"kvheadroom_{origin}_pool_tokens") == said.pool_tokens
                assert serve.value(f"kvheadroom_{origin}_blocks") == blocks
                assert serve.value(f"kvheadroom_{origin}_block_size_tokens") == 128
                assert serve.value(f"kvheadroom_{origin}_pool_bytes") == POOL_BYTES
                for tokens, needed in (("2048", longest), ("640", shorter)):
                    capacity = serve.value(f"kvheadroom_{origin}_sessions", session_tokens=tokens)
                    assert capacity == pytest.approx(blocks / needed)
            # Blocks x block size are no tokens here.
            assert serve.value("kvheadroom_used_tokens") is None
            assert status_of(serve, "odd")["engines"][0]["predicted"]["cannot_predict"] == []
