"""A real vLLM behind everything that it has of its own: a key, TLS both ways, and a path in front of its routes."""

import json
from functools import partial
from pathlib import Path

from tests.daemon import check, daemon, wait_for
from tests.doubles.http_server import make_certificate
from tests.end_to_end.conftest import TINY_GQA_FLAGS, Progress
from tests.end_to_end.tiny_model import write_model
from tests.end_to_end.vllm_server import VllmServer

KEY = "sk-real-5f0c"


def test_a_vllm_with_a_key_tls_and_a_root_path_is_watched_like_any_other(
    vllm_python: Path, tmp_path: Path, progress: Progress
) -> None:
    certificate = make_certificate(tmp_path)
    (tmp_path / "key").write_text(KEY + "\n")
    flags = {**TINY_GQA_FLAGS, "--api-key": KEY, "--root-path": "/llm"}
    model = write_model(tmp_path / "gqa", "gqa")
    log = tmp_path / "vllm.log"
    with VllmServer(vllm_python, model, flags, log, certificate=certificate, progress=progress) as vllm:
        files = dict.fromkeys(("ca_file", "cert_file", "key_file"), str(certificate))
        whole = {
            "gpu": "CPU",
            "url": f"{vllm.base_url}/llm",
            "api_key_file": str(tmp_path / "key"),
            "tls": files,
        }
        replicas = [
            {"name": "whole", **whole},
            {"name": "no-path", **whole, "url": vllm.base_url},
            {"name": "no-key", **{name: whole[name] for name in whole if name != "api_key_file"}},
            {"name": "no-certificate", **whole, "tls": {"ca_file": str(certificate)}},
            {"name": "no-trust", **whole, "tls": {name: files[name] for name in ("cert_file", "key_file")}},
        ]
        config = tmp_path / "kvheadroom.yaml"
        config.write_text(json.dumps({"scrape_interval": "1s", "replicas": replicas}))
        with daemon("serve", "--config", config) as serve:
            for name in ("whole", "no-path"):
                wait_for(partial(serve.value, "kvheadroom_predicted_blocks", replica=name), name)
                assert serve.value("kvheadroom_predicted_blocks", replica=name) == 128
                assert serve.value("kvheadroom_observed_blocks", replica=name) == 128
                for source in ("metrics", "version", "models", "model_files"):
                    assert serve.value("kvheadroom_source_up", replica=name, source=source) == 1
            # vLLM's root path does not move its routes, and its key guards /v1 alone.
            failures = [
                ("no-key", "models", "unauthorized"),
                ("no-trust", "metrics", "tls"),
            ]
            for name, source, reason in failures:
                labels = {"replica": name, "source": source, "reason": reason}
                wait_for(partial(serve.value, "kvheadroom_source_failures_total", **labels), name)
            assert serve.value("kvheadroom_observed_blocks", replica="no-key") == 128
            assert serve.value("kvheadroom_source_up", replica="no-certificate", source="metrics") == 0
            wait_for(
                lambda: "GET /llm/metrics/?name" in vllm.startup_log, "a filtered scrape under the root path"
            )
            page = serve.pages()
            assert "it may ask for a client certificate" in page
            assert "the server asks for an API key; set `api_key_file`" in page
            assert (
                KEY not in page + serve.get("/metrics").text + serve.get("/api/v1/status").text + serve.output
            )
        config.write_text(json.dumps({"replicas": replicas[:1]}))
        run = check("--config", config)
        assert run.returncode == 0, run.stdout
        assert "1 of 1 replicas complete" in run.stdout
