"""Without a target and without a config the vLLM servers of this machine are found: real processes with real words."""

import contextlib
import os
import re
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest

from tests.daemon import Daemon, check, daemon, wait_for
from tests.doubles.vllm_stand_in import MODEL, stand_in
from tests.end_to_end.server_process import free_loopback_port
from tests.test_daemon import config_file

SOURCE = "process_discovery"
SECRET = "S3CRET"
PREDICTED = "kvheadroom_predicted_pool_tokens"
OBSERVED = "kvheadroom_observed_pool_tokens"


def free_port() -> tuple[str, str]:
    """(port, the replica that a server there is)."""
    port = str(free_loopback_port())
    return port, f"127.0.0.1:{port}"


def flags(serve: Daemon, replica: str) -> dict[str, dict[str, str]]:
    status = serve.get("/api/v1/status").json()
    (one,) = (each for each in status["replicas"] if each["replica"] == replica)
    # Numbers that are too old are withheld, with all that belongs to them.
    found: dict[str, dict[str, str]] = one["engines"][0]["facts"]["flags"] if one["engines"] else {}
    return found


def wait_for_flag(serve: Daemon, replica: str, name: str, value: str, origin: str) -> None:
    told = {"value": value, "origin": origin}
    wait_for(lambda: flags(serve, replica).get(name) == told, f"{name} {value} ({origin})")


def config(folder: Path, more: str = "") -> Path:
    return config_file(folder, f"process_discovery: {{refresh_interval: 200ms{more}}}")


def test_servers_come_and_go_and_each_is_predicted_from_its_own_flags(tmp_path: Path) -> None:
    port, replica = free_port()
    other, second = free_port()
    words = ["serve", str(MODEL), f"--port={port}", "--max_num_se", "64", "--dtype", "bfloat16"]
    with daemon("serve", "--config", config(tmp_path)) as serve:
        assert "watching the vLLM servers that run on this machine every 0.5 s" in serve.output
        wait_for(lambda: serve.value("kvheadroom_source_up", source=SOURCE) is not None, "the source")
        assert serve.value("kvheadroom_replica_info", replica=replica) is None
        with stand_in(tmp_path, *words, place=port, kind="titled"):
            wait_for(lambda: serve.value(OBSERVED, replica=replica) == 4096, "the server")
            assert serve.value("kvheadroom_replica_info", replica=replica, source=SOURCE) == 1
            wait_for(lambda: serve.value(PREDICTED, replica=replica) == 4096, "its prediction")
            wait_for_flag(serve, replica, "max_num_seqs", "64", "its command line")
            wait_for_flag(serve, replica, "dtype", "bfloat16", "its command line")
            # What the running engine says of itself comes first.
            wait_for_flag(serve, replica, "kv_cache_memory_bytes", "4194304", "echoed by the engine")
            page = serve.pages()
            assert "found by process_discovery" in page
            assert "its command line" in page
            more = ["serve", str(MODEL), "--port", other]
            with stand_in(tmp_path, *more, place=other, kind="children"):
                wait_for(lambda: serve.value(OBSERVED, replica=second) == 4096, "the second")
                assert serve.value("kvheadroom_replica_info", replica=replica) == 1
            wait_for(
                lambda: serve.value("kvheadroom_replica_info", replica=second) is None, "the second's end"
            )
            assert serve.value(OBSERVED, replica=replica) == 4096
        wait_for(lambda: serve.value("kvheadroom_replica_info", replica=replica) is None, "the end")
        assert serve.value(OBSERVED, replica=replica) is None
        assert "Traceback" not in serve.output


def lines_of(run: "subprocess.CompletedProcess[str]", replica: str) -> str:
    """What `check` says of one replica."""
    _, found, rest = run.stdout.partition(f"replica {replica} ")
    assert found, run.stdout + run.stderr
    return rest.partition("\n\n")[0]


def test_no_shard_leaves_servers_of_its_own_machine_to_others(tmp_path: Path) -> None:
    port, replica = free_port()
    with stand_in(tmp_path, "serve", str(MODEL), "--port", port, place=port):
        assert "observed 4,096" in lines_of(check("--shard", "0/2"), replica)
        assert "observed 4,096" in lines_of(check("--shard", "1/2"), replica)


def test_check_without_arguments_finds_every_way_to_start_one(tmp_path: Path) -> None:
    module, forked, socket = (tmp_path / name for name in ("module", "forked", "socket"))
    for folder in (module, forked, socket):
        folder.mkdir()
    (first, one), (second, two) = free_port(), free_port()
    (forked / "f.yaml").write_text(f"port: {second}\nmodel: {MODEL}\nmax_num_seqs: 32\n")
    uds = str(tmp_path / "v.sock")
    with (
        stand_in(module, "--model", str(MODEL), "--port", first, "-tp", "1", place=first, module=True),
        stand_in(forked, "serve", "--config", "f.yaml", "--max-num-seqs", "16", place=second, kind="forked"),
        stand_in(socket, "serve", str(MODEL), "--uds", "../v.sock", place=uds),
    ):
        run = check()
    for name in (one, two, "../v.sock"):
        told = lines_of(run, name)
        assert "predicted 4,096 tokens, observed 4,096, difference 0" in told, told
    assert "flags     its command line: tensor_parallel_size 1" in lines_of(run, one)
    assert "flags     its command line: max_num_seqs 16" in lines_of(run, two)
    # All of it was read, so what it leaves out is no assumption.
    assert "assumed" not in lines_of(run, two)
    assert "source process_discovery:" in run.stdout


PLACES = (
    ["--api-key", SECRET],
    [f"--api_k={SECRET}", "--args-json", f'{{"api_key": "{SECRET}"}}'],
    ["--speculative-config", f'{{"method": "{SECRET} x", "headers": {{"Authorization": "{SECRET}"}}}}'],
    ["--kv-transfer-config.kv_connector_extra_config.token", SECRET],
    ["--max-model-len", SECRET, "--kv-cache-dtype", f"{SECRET} {SECRET}"],
    [SECRET, f"--of-a-plugin={SECRET}", "--hf-token", SECRET],
)


def test_no_secret_of_a_command_line_comes_out_anywhere(tmp_path: Path) -> None:
    names = ("HF_TOKEN", "VLLM_API_KEY", "AWS_SECRET_ACCESS_KEY", "HF_ENDPOINT")
    secrets = dict.fromkeys(names, SECRET)
    text = f"api-key: [{SECRET}]\n{SECRET}: {SECRET}\nhf-overrides: {{a: {SECRET}}}\n"
    (tmp_path / "f.yaml").write_text(text)
    replicas = []
    with contextlib.ExitStack() as stack:
        for place in PLACES:
            port, replica = free_port()
            words = ["serve", str(MODEL), "--config", "f.yaml", "--port", port, *place]
            stack.enter_context(stand_in(tmp_path, *words, place=port, environment=secrets))
            replicas.append(replica)
        serve = stack.enter_context(daemon("serve", "--config", config(tmp_path)))
        for replica in replicas:
            wait_for(partial(serve.value, OBSERVED, replica=replica), replica)
            wait_for_flag(serve, replica, "kv_cache_memory_bytes", "4194304", "echoed by the engine")
        shown = [serve.get(path).text for path in ("/", "/metrics", "/api/v1/status")]
        shown += [serve.output, check().stdout]
    for text in shown[:3]:
        assert all(replica in text for replica in replicas)
    assert all(SECRET not in text for text in shown)


def test_names_that_whoever_starts_a_server_makes_up_break_no_page_and_forge_no_line(tmp_path: Path) -> None:
    odd = "a\udcff\nforged line"
    (tmp_path / odd).mkdir()
    socket = tmp_path / f"{odd}.sock"
    port, replica = free_port()
    with (
        stand_in(tmp_path, "serve", odd, "--uds", str(socket), place=str(socket)) as one,
        stand_in(tmp_path, "serve", odd, "--port", port, "--served-model-name", odd, place=port),
        daemon("serve", "--config", config(tmp_path)) as serve,
    ):
        wait_for(lambda: serve.value("kvheadroom_replica_info", replica=replica), "the one with a port")
        name = f"unix socket of PID {one.pid}"
        wait_for(lambda: serve.value(OBSERVED, replica=name) == 4096, "the one with a socket")
        assert serve.get("/").status_code == 200
        assert serve.get("/api/v1/status").json()["replicas"]
    assert not any(line.startswith("forged line") for line in serve.output.splitlines())


AS_NOBODY = """
import encodings.idna, os, sys
import kvheadroom.app, kvheadroom.outputs.check_report
from kvheadroom.cli import main
os.setgroups([]); os.setgid(65534); os.setuid(65534)
sys.exit(main(["check"]))
"""


@pytest.mark.skipif(os.getuid() != 0, reason="only root can become another user")
def test_of_another_users_server_is_told_what_is_not_seen_and_which_option_helps(tmp_path: Path) -> None:
    port, replica = free_port()
    words = ["serve", str(MODEL), "--port", port, "--max-num-seqs", "16"]
    with stand_in(tmp_path, *words, place=port):
        run = subprocess.run(
            [sys.executable, "-c", AS_NOBODY], capture_output=True, text=True, check=False, timeout=60
        )
    assert run.returncode == 1, run.stdout + run.stderr
    told = lines_of(run, replica)
    assert "its command line: max_num_seqs 16" in told
    assert "command_line: nothing more than was read, but its environment may not be read" in told
    assert "FAILED, no_permission: of " in run.stdout
    assert "run kvheadroom as root or as the servers' user, or give it CAP_SYS_PTRACE" in run.stdout


def can_have_mounts_of_its_own() -> bool:
    try:
        return (
            subprocess.run(
                ["unshare", "-m", "mount", "-t", "tmpfs", "x", "/mnt"], check=False, capture_output=True
            ).returncode
            == 0
        )
    except OSError:
        return False


@pytest.mark.skipif(not can_have_mounts_of_its_own(), reason="mounts of its own need CAP_SYS_ADMIN")
def test_the_model_of_a_server_in_a_container_is_read_where_only_the_server_sees_it(tmp_path: Path) -> None:
    port, replica = free_port()
    models = tmp_path / "models"
    (models / "llama").mkdir(parents=True)
    # Here is a folder of the same name, with another model in it.
    (models / "llama" / "config.json").write_text("{}")
    script = f'mount -t tmpfs x "{models}" && cp -r "{MODEL}" "{models}/llama" && exec "$@"'
    launcher = ["unshare", "-m", "sh", "-c", script, "sh"]
    words = ["serve", str(models / "llama"), "--port", port]
    with stand_in(tmp_path, *words, place=port, launcher=launcher, model=models / "llama") as running:
        told = lines_of(check(), replica)
    assert f"LlamaForCausalLM in /proc/{running.pid}/root{models}/llama" in told
    assert "predicted 4,096 tokens, observed 4,096, difference 0" in told


@pytest.mark.skipif(
    os.getuid() != 0 or not can_have_mounts_of_its_own(), reason="a /proc of its own needs CAP_SYS_ADMIN"
)
@pytest.mark.parametrize(
    ("hidepid", "told"),
    [
        (1, r"the command line of \d+ processes may not be read"),
        (2, "processes of other users do not show up here"),
    ],
    ids=["noaccess", "invisible"],
)
def test_where_other_users_processes_are_hidden_that_is_told_and_which_option_helps(
    hidepid: int, told: str
) -> None:
    script = f'mount -t proc -o hidepid={hidepid} proc /proc && exec "$@"'
    run = subprocess.run(
        ["unshare", "-m", "sh", "-c", script, "sh", sys.executable, "-c", AS_NOBODY],
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert run.returncode == 1, run.stdout + run.stderr
    assert re.search(rf"FAILED, no_permission: {told}.*; run kvheadroom as root", run.stdout)
    assert "Looked for: `vllm serve`" in run.stdout


def test_a_machine_without_a_server_says_what_was_looked_for_and_keeps_watching(tmp_path: Path) -> None:
    with daemon("serve") as serve:
        wait_for(lambda: serve.get("/-/ready").status_code == 200, "readiness")
        status = serve.get("/api/v1/status").json()
        (source,) = status["discoveries"]
        if not status["replicas"]:
            assert "Looked for: `vllm serve`" in source["note"]
            assert "--target http://host:8000" in serve.pages()
        port, replica = free_port()
        with stand_in(tmp_path, "serve", str(MODEL), "--port", port, place=port):
            wait_for(lambda: serve.value(OBSERVED, replica=replica) == 4096, "the server", seconds=30)


def test_a_server_that_the_config_names_too_keeps_its_name_and_sees_its_own_restart(tmp_path: Path) -> None:
    port, replica = free_port()
    words = ["serve", str(MODEL), "--port", port, "--max-num-seqs"]
    text = f"replicas: [{{url: 'http://localhost:{port}', name: mine}}]\nprocess_discovery: {{refresh_interval: 200ms}}"
    with daemon("serve", "--config", config_file(tmp_path, text)) as serve:
        for seqs in ("8", "9"):
            with stand_in(tmp_path, *words, seqs, place=port):
                wait_for_flag(serve, "mine", "max_num_seqs", seqs, "its command line")
                assert serve.value("kvheadroom_replica_info", replica="mine", source="config") == 1
                assert serve.value("kvheadroom_replica_info", replica=replica) is None
            wait_for(
                lambda: serve.value("kvheadroom_replica_state", replica="mine", state="down") == 1, "its end"
            )
        # Its sampler is another one each time that its process comes or goes, and remembers all the same.
        assert serve.value("kvheadroom_replica_restarts_total", replica="mine") == 1


def test_the_config_adds_what_no_command_line_tells_and_wins_over_it(tmp_path: Path) -> None:
    port, replica = free_port()
    words = ["serve", str(MODEL), "--port", port, "--max-num-seqs", "8", "-tp", "2"]
    more = ", replica: {labels: {site: a}, flags: {max_num_seqs: 4}}"
    with (
        stand_in(tmp_path, *words, place=port),
        daemon("serve", "--config", config(tmp_path, more), "--target", "http://127.0.0.1:1") as serve,
    ):
        assert "watching 127.0.0.1:1 and the vLLM servers that run on this machine" in serve.output
        wait_for(lambda: serve.value("kvheadroom_replica_info", replica=replica, site="a") == 1, "it")
        wait_for(lambda: serve.value(OBSERVED, replica=replica) == 4096, "its numbers")
        wait_for_flag(serve, replica, "max_num_seqs", "4", "your config")
        wait_for_flag(serve, replica, "tensor_parallel_size", "2", "its command line")


def test_a_tier_that_is_larger_than_the_servers_machine_is_told_and_what_its_processes_have(
    tmp_path: Path,
) -> None:
    port, replica = free_port()
    words = ["serve", str(MODEL), "--port", port, "--kv-offloading-size", "1000000"]
    with stand_in(tmp_path, *words, place=port):
        told = lines_of(check(), replica)
        assert "tier      tier_above_shm: the tier takes 1,000,000.00 GiB of the host's memory" in told, told
        assert "tier      tier_above_host_memory: the tier takes 1,000,000.00 GiB" in told, told
        with daemon("serve", "--config", config(tmp_path)) as serve:
            shared = partial(serve.value, "kvheadroom_observed_host_shared_bytes", replica=replica)
            wait_for(lambda: shared() is not None, "the memory of its processes")
            assert serve.value("kvheadroom_warm_finding", replica=replica, finding="tier_above_shm") == 1
            assert serve.value("kvheadroom_predicted_tier_host_bytes", replica=replica) == 1_000_000 * 2**30
    with stand_in(tmp_path, *words[:-2], place=port):
        assert "  tier" not in lines_of(check(), replica)
