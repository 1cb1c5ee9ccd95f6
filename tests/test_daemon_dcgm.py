"""GPUs of other machines in the daemon and in `check`, told by DCGM-exporters."""

import os
import signal
import time
from http.server import BaseHTTPRequestHandler
from pathlib import Path

import pytest

from tests.daemon import check, daemon, wait_for
from tests.dcgm_pages import H200, gpu, h200, page, series
from tests.doubles.fake_nvml import FakeDriver, FakeGpu
from tests.doubles.http_server import Answer, http_server, text_answer
from tests.test_daemon import config_file, vllm_answers

ONE, TWO = "GPU-11111111-2222-3333-4444-555555555555", "GPU-66666666-7777-8888-9999-aaaaaaaaaaaa"
MIB = 2**20
NAMED = "<b>NVIDIA H200</b>"


class Exporter:
    """A DCGM-exporter whose answer the test changes."""

    def __init__(self, text: str) -> None:
        self.answer: Answer = text_answer(text)

    def __call__(self, request: BaseHTTPRequestHandler) -> None:
        self.answer(request)


def config(folder: Path, vllm: str, dcgm: str, replica: str) -> Path:
    return config_file(
        folder,
        f"replicas: [{{url: '{vllm}', name: r, gpu: CPU}}, {{url: '{vllm}/s', name: s, {replica}}}]\n"
        f"dcgm_exporters: [{{url: '{dcgm}', refresh_interval: 500ms}}]\n",
    )


def test_the_gpus_of_another_machine_are_shown_with_their_replica_and_withheld_when_their_exporter_is_gone(
    tmp_path: Path,
) -> None:
    both = page(
        gpu(series(ONE, name=NAMED, pod="chat-0", namespace="vllm"), xid=79, **H200),
        gpu(series(TWO, 1), free=1, used=2),
    )
    exporter = Exporter(both)
    with http_server(vllm_answers()) as (vllm, _), http_server({"/metrics": exporter}) as (dcgm, _):
        file = config(tmp_path, vllm, dcgm, "pod: vllm/chat-*")
        with daemon("serve", "--config", file) as serve:
            total, up = "kvheadroom_gpu_memory_total_bytes", "kvheadroom_gpu_up"
            wait_for(lambda: serve.value(total, replica="s", gpu=ONE) == 143_771 * MIB, "the GPU")
            assert serve.value("kvheadroom_gpu_memory_used_bytes", replica="s", gpu=ONE) == 130_003 * MIB
            assert serve.value("kvheadroom_gpu_memory_free_bytes", replica="", gpu=TWO) == MIB
            assert serve.value(total, gpu=TWO) is None
            assert serve.value("kvheadroom_gpu_assignment", replica="s", gpu=ONE, by="pod") == 1
            assert serve.value(
                "kvheadroom_gpu_info", gpu=ONE, source="dcgm_exporters[0]", host="node-1", memory="v2"
            )
            since = serve.value("kvheadroom_gpu_memory_changed_timestamp_seconds", gpu=ONE)
            assert since is not None
            assert time.time() - 20 < since <= time.time()
            assert "kvheadroom_gpu_xid_errors_total" not in serve.metrics()
            html = serve.pages()
            assert "last Xid 79" in html
            assert "its total is not known, since the exporter tells no DCGM_FI_DEV_FB_RESERVED" in html
            assert NAMED not in html
            status = serve.get("/api/v1/status").json()["remote_gpus"]
            assert [one["up"] for one in status["exporters"]] == [True]
            assert [(one["gpu"], one["replicas"], one["last_xid"]) for one in status["gpus"]] == [
                (ONE, ["s"], 79),
                (TWO, [], None),
            ]

            # The config gives the GPU by its UUID now; the exporter goes on being asked.
            config(tmp_path, vllm, dcgm, f"gpus: [{TWO}]")
            os.kill(serve.pid, signal.SIGHUP)
            wait_for(lambda: serve.value(up, replica="s", gpu=TWO) == 1, "the other GPU")
            assert serve.value(total, replica="", gpu=ONE) == 143_771 * MIB

            exporter.answer = text_answer("gone", status=500)
            source = {"replica": "", "source": "dcgm_exporters[0]"}
            wait_for(lambda: serve.value("kvheadroom_source_up", **source) == 0, "the fault")
            wait_for(lambda: serve.value(up, replica="s", gpu=TWO) == 0, "the end of the numbers")
            assert serve.value("kvheadroom_gpu_memory_free_bytes", gpu=TWO) is None
            assert "status 500" in serve.pages()
            exporter.answer = text_answer(both)
            wait_for(lambda: serve.value(up, replica="s", gpu=TWO) == 1, "its return")


@pytest.mark.parametrize("known", [True, False])
def test_check_tells_of_every_exporter_and_ends_with_1_where_a_gpu_is_missing(
    tmp_path: Path, *, known: bool
) -> None:
    with (
        http_server(vllm_answers()) as (vllm, _),
        http_server({"/metrics": text_answer(h200(ONE))}) as (dcgm, _),
    ):
        text = (
            f"replicas: [{{url: '{vllm}', flags: {{block_size: 16}}, gpu: CPU}}]\n"
            if known
            else f"replicas: [{{url: '{vllm}', gpus: [GPU-99999999]}}]\n"
        )
        file = config_file(tmp_path, f"{text}dcgm_exporters: [{{url: '{dcgm}'}}]\n")
        run = check("--config", file)
    assert f"dcgm_exporters[0]  {dcgm}/metrics: 1 GPU\n" in run.stdout
    assert f"{ONE} NVIDIA H200 on node-1, 12.86 GiB free, serves no replica" in run.stdout
    missing = "MISSING, GPU-99999999 of replica"
    assert (missing in run.stdout) == (not known)
    if not known:
        assert run.returncode == 1


def test_what_this_machines_driver_tells_of_a_gpu_is_believed_before_an_exporter(
    tmp_path: Path, library: Path
) -> None:
    folder = tmp_path / "driver"
    folder.mkdir()
    driver = FakeDriver(
        folder, gpus=[FakeGpu(ONE, total=150_754_820_111, reserved=652_214_273, used=120_000_000_007)]
    )
    driver.install(library)
    driver.apply()
    both = h200(ONE) + h200(TWO, 1)
    with http_server(vllm_answers()) as (vllm, _), http_server({"/metrics": text_answer(both)}) as (dcgm, _):
        file = config(tmp_path, vllm, dcgm, f"gpus: [{ONE}, {TWO}]")
        with daemon("serve", "--config", file, environment=driver.environment()) as serve:
            total = "kvheadroom_gpu_memory_total_bytes"
            wait_for(lambda: serve.value(total, replica="s", gpu=TWO) == 143_771 * MIB, "the other machine's")
            wait_for(lambda: serve.value(total, replica="s", gpu=ONE) == 150_754_820_111, "this machine's")
            assert serve.value("kvheadroom_gpu_info", gpu=ONE, source="nvml") == 1
            assert serve.value("kvheadroom_gpu_info", gpu=TWO, source="dcgm_exporters[0]") == 1
            assert "is not on this machine" not in serve.pages()
