"""GPUs that a real Prometheus scraped from a DCGM-exporter, read from its `/federate`."""

import asyncio
import time
from urllib.parse import urlsplit

import pytest

from kvheadroom.capacity.remote_gpus import ExporterStatus, Pod
from kvheadroom.config import DcgmExporter
from kvheadroom.gpu_exporters import GpuExporters
from kvheadroom.sources.http import open_session
from kvheadroom.sources.slow_files import SlowFiles
from tests.dcgm_pages import H200, gpu, page, series
from tests.doubles.http_server import http_server, text_answer
from tests.end_to_end.prometheus_server import Binaries, PrometheusServer

ONE, TWO = "GPU-11111111-2222-3333-4444-555555555555", "GPU-66666666-7777-8888-9999-aaaaaaaaaaaa"
MIB = 2**20


def ask(url: str) -> ExporterStatus:
    async def run() -> ExporterStatus:
        told: list[tuple[ExporterStatus, ...]] = []
        async with open_session() as session:
            exporters = GpuExporters(session, SlowFiles(), told.append)
            exporters.set_exporters([DcgmExporter(url=url)], start=False)
            await exporters.ask_all()
        return told[-1][0]

    return asyncio.run(run())


@pytest.mark.parametrize("honors", [True, False])
def test_what_a_prometheus_scraped_is_read_with_its_pods_and_timestamps(
    each_prometheus: Binaries, *, honors: bool
) -> None:
    text = page(
        gpu(series(ONE, pod="chat-0", namespace="vllm", container="vllm"), **H200),
        gpu(series(TWO, 1, instance="3", pod="", namespace=""), free=100, used=200, reserved=7),
    )
    with http_server({"/metrics": text_answer(text)}) as (url, _):
        scrape = {
            "job_name": "dcgm",
            "honor_labels": honors,
            "static_configs": [
                {
                    "targets": [urlsplit(url).netloc],
                    "labels": {"pod": "dcgm-exporter-x", "namespace": "gpu-operator", "node": "n"},
                }
            ],
        }
        with PrometheusServer(each_prometheus, [scrape]) as prometheus:
            prometheus.wait_for("DCGM_FI_DEV_FB_FREE")
            status = ask(f'{prometheus.base_url}/federate?match[]={{__name__=~"DCGM_FI_DEV_FB_.*"}}')
    assert status.failure is None, status.failure
    assert status.failures == ()
    assert status.url == f"{prometheus.base_url}/federate"
    whole, part = status.gpus if status.gpus[0].gpu == ONE else status.gpus[::-1]
    assert (whole.gpu, whole.total_bytes, whole.host) == (ONE, 143_771 * MIB, "node-1")
    assert (part.gpu, part.total_bytes) == (f"MIG-{TWO}/3", 307 * MIB)
    assert whole.pods == (Pod("vllm", "chat-0"),)
    # Nobody has it; the plain labels that Prometheus keeps are of the exporter's own pod.
    assert part.pods == ()
    assert status.taken_at is not None
    assert time.time() - status.taken_at < 60
