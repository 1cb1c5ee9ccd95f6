"""GPUs in the daemon: read through NVIDIA's bindings from a fake driver, joined to replicas by the config."""

import os
import time
from dataclasses import replace
from pathlib import Path

import pytest

from kvheadroom.capacity.gpu_catalogue import GPUS
from kvheadroom.sources.process_tree import INITIAL_PID_NAMESPACE
from tests.daemon import Daemon, check, daemon, wait_for
from tests.doubles.fake_nvml import ANY, MEMORY_V2, FakeDriver, FakeGpu, FakeMig
from tests.doubles.http_server import http_server
from tests.doubles.vllm_stand_in import MODEL, stand_in
from tests.end_to_end.server_process import free_loopback_port
from tests.test_daemon import config_file, vllm_answers

ONE = FakeGpu("GPU-11111111", total=150_754_820_111, reserved=652_214_273, used=120_000_000_007)
TWO = FakeGpu("GPU-22222222", total=25_757_220_869, reserved=596_639_747, used=3)
LOST, NO_PERMISSION = 15, 4


@pytest.fixture
def driver(tmp_path: Path, library: Path) -> FakeDriver:
    folder = tmp_path / "driver"
    folder.mkdir()
    driver = FakeDriver(folder, gpus=[ONE, TWO])
    driver.install(library)
    driver.apply()
    return driver


def one_replica(folder: Path, url: str, gpus: str = "[GPU-11111111]") -> Path:
    return config_file(folder, f"replicas: [{{url: '{url}', name: r, gpus: {gpus}}}]")


def test_free_memory_is_joined_to_its_replica_and_the_rest_shown_unassigned(
    tmp_path: Path, driver: FakeDriver
) -> None:
    with (
        http_server(vllm_answers()) as (url, _),
        daemon("serve", "--config", one_replica(tmp_path, url), environment=driver.environment()) as serve,
    ):
        free = "kvheadroom_gpu_memory_free_bytes"
        wait_for(lambda: serve.value(free, gpu=ONE.uuid) is not None, "the GPUs")
        assert serve.value(free, replica="r", gpu=ONE.uuid) == ONE.total - ONE.reserved - ONE.used
        assert serve.value("kvheadroom_gpu_memory_used_bytes", replica="r", gpu=ONE.uuid) == ONE.used
        assert serve.value("kvheadroom_gpu_memory_reserved_bytes", replica="r", gpu=ONE.uuid) == ONE.reserved
        assert serve.value("kvheadroom_gpu_memory_total_bytes", replica="r", gpu=ONE.uuid) == ONE.total
        assert serve.value(free, replica="", gpu=TWO.uuid) == TWO.total - TWO.reserved - TWO.used
        assert serve.value("kvheadroom_source_up", replica="", source="nvml") == 1
        assert "No replica is known to run on these" in serve.pages()

        # The memory moves, and it is the live value that is shown.
        driver.gpus = [FakeGpu(ONE.uuid, ONE.total, ONE.reserved, used=130_000_000_003), TWO]
        driver.apply()
        wait_for(
            lambda: serve.value("kvheadroom_gpu_memory_used_bytes", gpu=ONE.uuid) == 130_000_000_003,
            "the new value",
        )


def platform(serve: Daemon, replica: str) -> tuple[str, str] | None:
    status = serve.get("/api/v1/status").json()
    for one in status["replicas"]:
        if one["replica"] == replica and one["engines"]:
            fact = one["engines"][0]["facts"]["platform"]
            return fact["value"], fact["origin"]
    return None


def hbm_bytes(serve: Daemon, replica: str) -> int | None:
    status = serve.get("/api/v1/status").json()
    (one,) = (each for each in status["replicas"] if each["replica"] == replica)
    fact = one["engines"][0]["facts"]["hbm_bytes"] if one["engines"] else None
    return None if fact is None else int(fact["value"])


def test_the_card_of_a_server_of_this_machine_is_that_of_the_machine(
    tmp_path: Path, driver: FakeDriver
) -> None:
    driver.gpus = [ONE, replace(TWO, name=ONE.name)]
    driver.apply()
    port = str(free_loopback_port())
    replica = f"127.0.0.1:{port}"
    config = config_file(tmp_path, "process_discovery: {refresh_interval: 200ms}")
    with (
        stand_in(tmp_path, "serve", str(MODEL), "--port", port, place=port, release="0.32.0"),
        daemon("serve", "--config", config, environment=driver.environment()) as serve,
    ):
        wait_for(lambda: platform(serve, replica) == ("cuda", "this machine"), "its card")
        assert hbm_bytes(serve, replica) == GPUS["H200"].cuda_total_bytes


@pytest.mark.skipif(
    str(Path("/proc/self/ns/pid").readlink()) != INITIAL_PID_NAMESPACE,
    reason="in a container with process numbers of its own nothing is joined",
)
def test_of_cards_of_two_kinds_the_one_counts_that_the_servers_processes_are_on(
    tmp_path: Path, driver: FakeDriver
) -> None:
    port = str(free_loopback_port())
    replica = f"127.0.0.1:{port}"
    config = config_file(tmp_path, "process_discovery: {refresh_interval: 200ms}")
    with stand_in(tmp_path, "serve", str(MODEL), "--port", port, place=port, release="0.32.0") as running:
        driver.gpus = [
            ONE,
            replace(TWO, name="NVIDIA GeForce RTX 4090", processes=((running.pid, 5_000_000),)),
        ]
        driver.apply()
        with daemon("serve", "--config", config, environment=driver.environment()) as serve:
            wait_for(lambda: platform(serve, replica) == ("cuda", "this machine"), "its card")
            assert hbm_bytes(serve, replica) == GPUS["RTX4090"].cuda_total_bytes


@pytest.mark.skipif(
    str(Path("/proc/self/ns/pid").readlink()) != INITIAL_PID_NAMESPACE,
    reason="in a container with process numbers of its own nothing is joined",
)
def test_a_gpu_that_the_servers_process_is_on_is_joined_to_it_without_a_word_in_the_config(
    tmp_path: Path, driver: FakeDriver
) -> None:
    # The double of vLLM listens in this very process.
    own = replace(ONE, processes=((os.getpid(), 90_000_000_001), (4_100_000_000, 29_000_000_000)))
    driver.gpus = [own, TWO]
    driver.apply()
    with http_server(vllm_answers()) as (url, _):
        config = config_file(tmp_path, f"replicas: [{{url: '{url}', name: r}}]")
        with daemon("serve", "--config", config, environment=driver.environment()) as serve:
            wait_for(lambda: serve.value("kvheadroom_gpu_up", gpu=ONE.uuid) is not None, "the GPUs")
            assert serve.value("kvheadroom_gpu_assignment", replica="r", gpu=ONE.uuid, by="process") == 1
            others = serve.value("kvheadroom_gpu_memory_others_bytes", replica="r", gpu=ONE.uuid)
            assert others == ONE.used - 90_000_000_001
            free = "kvheadroom_gpu_memory_free_bytes"
            assert serve.value(free, replica="r", gpu=ONE.uuid) == ONE.total - ONE.reserved - ONE.used
            assert serve.value(free, replica="", gpu=TWO.uuid) is not None
            assert serve.value("kvheadroom_gpu_assignment", gpu=TWO.uuid) is None
            assert "Its processes are on these" in serve.pages()


def test_a_server_on_none_of_the_gpus_is_told_as_such(tmp_path: Path, driver: FakeDriver) -> None:
    with http_server(vllm_answers()) as (url, _):
        config = config_file(tmp_path, f"replicas: [{{url: '{url}', name: r}}]")
        with daemon("serve", "--config", config, environment=driver.environment()) as serve:
            wait_for(lambda: serve.value("kvheadroom_gpu_up", gpu=ONE.uuid) is not None, "the GPUs")
            assert "Its GPUs are not known: " in serve.pages()
            assert serve.value("kvheadroom_gpu_memory_free_bytes", replica="", gpu=ONE.uuid) is not None


def test_mig_devices_and_indices_of_the_config_are_joined_to_their_replicas(
    tmp_path: Path, driver: FakeDriver
) -> None:
    part = FakeMig("MIG-aaaaaaaa-1", 0, 9, 0, total=18_790_481_923, reserved=7, used=11)
    driver.gpus = [TWO, replace(ONE, mig=1, migs=(part,))]
    driver.apply()
    with http_server(vllm_answers()) as (url, _):
        names = f"url: '{url}', name: a, gpus: [MIG-AAAAAAAA-1]", f"url: '{url}/', name: b, gpus: '0,1'"
        config = config_file(tmp_path, f"replicas: [{{{names[0]}}}, {{{names[1]}}}]")
        with daemon("serve", "--config", config, environment=driver.environment()) as serve:
            wait_for(lambda: serve.value("kvheadroom_gpu_up", gpu=TWO.uuid) is not None, "the GPUs")
            total = "kvheadroom_gpu_memory_total_bytes"
            assert serve.value(total, replica="a", gpu=part.uuid) == part.total
            assert serve.value(total, replica="b", gpu=TWO.uuid) == TWO.total
            assert serve.value(total, gpu=ONE.uuid) is None
            assert serve.value("kvheadroom_gpu_up", replica="b", gpu="1") == 0
            assert f"is divided into MIG devices; give the UUID of one of them ({part.uuid})" in serve.pages()


def test_an_xid_error_is_counted(tmp_path: Path, driver: FakeDriver) -> None:
    with (
        http_server(vllm_answers()) as (url, _),
        daemon("serve", "--config", one_replica(tmp_path, url), environment=driver.environment()) as serve,
    ):
        wait_for(lambda: serve.value("kvheadroom_gpu_up", gpu=ONE.uuid) == 1, "the GPU")
        assert serve.value("kvheadroom_gpu_xid_errors_total") is None
        driver.xids = [(ONE.uuid, 94, -1, -1)]
        driver.apply()
        errors = "kvheadroom_gpu_xid_errors_total"
        wait_for(lambda: serve.value(errors, gpu=ONE.uuid, xid="94") == 1, "the error")


def test_a_lost_gpu_hides_nothing_and_comes_back(tmp_path: Path, driver: FakeDriver) -> None:
    with (
        http_server(vllm_answers()) as (url, _),
        daemon("serve", "--config", one_replica(tmp_path, url), environment=driver.environment()) as serve,
    ):
        wait_for(lambda: serve.value("kvheadroom_gpu_up", gpu=ONE.uuid) == 1, "the GPU")
        wait_for(lambda: serve.value("kvheadroom_kv_usage_ratio", replica="r") is not None, "vLLM's numbers")
        driver.faults[ANY, ONE.uuid] = LOST
        driver.apply()
        wait_for(lambda: serve.value("kvheadroom_gpu_up", gpu=ONE.uuid) == 0, "the loss")
        assert serve.value("kvheadroom_gpu_memory_free_bytes", gpu=ONE.uuid) is None
        assert serve.value("kvheadroom_gpu_memory_free_bytes", gpu=TWO.uuid) is not None
        assert serve.value("kvheadroom_kv_usage_ratio", replica="r") is not None
        assert (serve.value("kvheadroom_source_failures_total", source="nvml", reason="lost") or 0) >= 1
        del driver.faults[ANY, ONE.uuid]
        driver.apply()
        wait_for(lambda: serve.value("kvheadroom_gpu_up", gpu=ONE.uuid) == 1, "the return")


def test_a_driver_that_hangs_delays_no_scrape_and_no_end(tmp_path: Path, driver: FakeDriver) -> None:
    driver.delays[MEMORY_V2, TWO.uuid] = 60_000
    driver.apply()
    with (
        http_server(vllm_answers()) as (url, _),
        daemon("serve", "--config", one_replica(tmp_path, url), environment=driver.environment()) as serve,
    ):
        wait_for(lambda: serve.value("kvheadroom_kv_usage_ratio", replica="r") is not None, "vLLM's numbers")
        for _ in range(20):
            assert serve.value("kvheadroom_kv_usage_ratio", replica="r") is not None
            time.sleep(0.1)
        # The GPU that hangs is one GPU less, and the other one is shown.
        wait_for(lambda: serve.value("kvheadroom_gpu_up", gpu=TWO.uuid) == 0, "the timeout")
        assert serve.value("kvheadroom_source_failures_total", source="nvml", reason="timeout")
        assert serve.value("kvheadroom_gpu_memory_used_bytes", gpu=ONE.uuid) == ONE.used
        code, took = serve.stop()
        assert (code, took < 1.0) == (0, True)


def test_without_a_driver_nothing_is_missing(tmp_path: Path, driver: FakeDriver) -> None:
    driver.uninstall()
    with http_server(vllm_answers()) as (url, _):
        config = config_file(tmp_path, f"replicas: [{{url: '{url}', name: r, gpu: CPU}}]")
        with daemon("serve", "--config", config, environment=driver.environment()) as serve:
            wait_for(lambda: serve.value("kvheadroom_kv_usage_ratio") is not None, "vLLM's numbers")
            assert serve.value("kvheadroom_source_up", source="nvml") is None
            assert "GPUs of this machine" not in serve.pages()


def test_check_tells_what_each_gpu_gives_and_which_is_not_here(tmp_path: Path, driver: FakeDriver) -> None:
    with http_server(vllm_answers()) as (url, _):
        config = one_replica(tmp_path, url, "[GPU-11111111, GPU-99999999]")
        run = check("--config", config, environment=driver.environment())
        assert run.returncode == 1
        assert "GPUs of this machine: 2 read" in run.stdout
        assert "gpu         GPU-11111111 NVIDIA H200, 28.04 GiB free, serves r" in run.stdout
        assert "serves no replica (give it to one with `gpus: [UUID]`)" in run.stdout
        assert "MISSING, GPU-99999999 of replica r is not on this machine" in run.stdout

        driver.faults[MEMORY_V2, ONE.uuid] = NO_PERMISSION
        driver.apply()
        run = check("--config", one_replica(tmp_path, url), environment=driver.environment())
        assert run.returncode == 1
        assert "FAILED, no_permission:" in run.stdout
        assert "GPUs of this machine: 1 read" in run.stdout

        driver.uninstall()
        run = check(
            "--config",
            config_file(tmp_path, f"replicas: [{{url: '{url}', gpu: CPU}}]"),
            environment=driver.environment(),
        )
        assert run.returncode == 0, run.stdout
        assert "no NVIDIA driver is installed, which is fine on a machine without GPUs" in run.stdout


@pytest.mark.skipif(
    str(Path("/proc/self/ns/pid").readlink()) != INITIAL_PID_NAMESPACE,
    reason="in a container with process numbers of its own nothing is joined",
)
def test_of_two_servers_found_here_the_one_at_a_unix_socket_has_its_own_gpu(
    tmp_path: Path, driver: FakeDriver
) -> None:
    port, socket = str(free_loopback_port()), str(tmp_path / "v.sock")
    config = config_file(tmp_path, "process_discovery: {refresh_interval: 200ms}")
    folders = (tmp_path / "port", tmp_path / "socket")
    for folder in folders:
        folder.mkdir()
    with (
        stand_in(folders[0], "serve", str(MODEL), "--port", port, place=port) as at_a_port,
        stand_in(folders[1], "serve", str(MODEL), "--uds", socket, place=socket) as at_a_socket,
    ):
        driver.gpus = [
            replace(ONE, processes=((at_a_port.pid, 5_000_000),)),
            replace(TWO, processes=((at_a_socket.pid, 3),)),
        ]
        driver.apply()
        with daemon("serve", "--config", config, environment=driver.environment()) as serve:
            by = "kvheadroom_gpu_assignment"
            wait_for(lambda: serve.value(by, gpu=TWO.uuid, replica=socket, by="process") == 1, "the socket's")
            assert serve.value(by, gpu=ONE.uuid, replica=f"127.0.0.1:{port}", by="process") == 1
            assert serve.value("kvheadroom_gpu_memory_others_bytes", replica=socket, gpu=TWO.uuid) == 0
