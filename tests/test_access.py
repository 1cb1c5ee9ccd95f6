"""Every way to reach a server: what is sent where, what each refusal is called, and that no secret is shown."""

import asyncio
import json
import subprocess
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import uvloop

from kvheadroom.access import open_endpoint, open_endpoints
from kvheadroom.app import ConfigFile, _reload, check
from kvheadroom.capacity.fleet import ReplicaAssessment
from kvheadroom.capacity.readings import FailureReason, Scrape
from kvheadroom.cli import _config
from kvheadroom.config import ConfigError, load_config, validate_config
from kvheadroom.outputs.check_report import check_report
from kvheadroom.sources.endpoint import Endpoint, Proxy
from kvheadroom.sources.http import fetch, open_session
from kvheadroom.sources.http_connection import default_context
from kvheadroom.sources.slow_files import SlowFiles
from kvheadroom.watch import Watch
from tests.conftest import capture
from tests.daemon import COMMAND, daemon, wait_for
from tests.doubles.http_proxy import http_proxy
from tests.doubles.http_server import guarded, http_server, make_certificate, text_answer
from tests.test_daemon import config_file, vllm_answers

SECRET = "s3cret-never-shown"
BASIC = "Basic bWU6czNjcmV0LW5ldmVyLXNob3du"  # base64 of me:s3cret-never-shown, by coreutils' base64


def checked(url: str, settings: Mapping[str, object]) -> tuple[ReplicaAssessment, str]:
    """What `kvheadroom check` finds of one replica, and its report."""
    config = validate_config({"replicas": [{"url": url, "name": "r", "gpu": "CPU", **settings}]}, "test")
    fleet = asyncio.run(check(config))
    report = "\n".join(check_report(fleet))
    assert SECRET not in report + repr(fleet) + repr(config)
    assert BASIC not in report + repr(fleet) + repr(config)
    return fleet.replicas[0], report


def all_well(url: str, settings: Mapping[str, object]) -> None:
    replica, report = checked(url, settings)
    assert {source.source for source in replica.sources} == {"metrics", "version", "models", "model_files"}
    assert "FAILED" not in report, report
    assert replica.engines[0].prediction.pool is not None
    assert replica.engines[0].prediction.pool.num_blocks == 128


def refused(url: str, settings: Mapping[str, object]) -> tuple[FailureReason, str]:
    failure = checked(url, settings)[0].sources[0].failure
    assert failure is not None
    assert failure.source == "metrics"
    return failure.reason, failure.detail


def secret_file(folder: Path) -> str:
    (folder / "secret").write_text(SECRET + "\n")
    return str(folder / "secret")


WAYS: dict[str, tuple[str, str, Any]] = {
    "basic_auth": ("Authorization", BASIC, lambda file: {"username": "me", "password_file": file}),
    "bearer_token_file": ("Authorization", f"Bearer {SECRET}", lambda file: file),
    "headers": ("X-Tenant-Key", SECRET, lambda file: {"X-Tenant-Key": {"file": file}, "X-Plain": "a b"}),
}


@pytest.mark.parametrize("setting", WAYS)
def test_credentials_for_what_stands_in_front_go_to_every_route(setting: str, tmp_path: Path) -> None:
    header, value, settings = WAYS[setting]
    with http_server(guarded(vllm_answers(), header=header, value=value)) as (url, seen):
        all_well(url, {setting: settings(secret_file(tmp_path))})
        assert {path for path, _ in seen} == {"/metrics", "/version", "/v1/models"}
        if setting == "headers":
            assert {headers["X-Plain"] for _, headers in seen} == {"a b"}
        reason, detail = refused(url, {})
    assert reason is FailureReason.UNAUTHORIZED
    assert detail == (
        f"GET {url}/metrics: status 401: something in front of the server asks for credentials "
        "(vLLM asks for none here); set `basic_auth` or `bearer_token_file`"
    )


def test_credentials_that_are_not_taken_are_told_by_their_setting(tmp_path: Path) -> None:
    (tmp_path / "old").write_text("old")
    settings = {"bearer_token_file": str(tmp_path / "old")}
    with http_server(guarded(vllm_answers(), header="Authorization", value=BASIC)) as (url, _):
        reason, detail = refused(url, settings)
    assert reason is FailureReason.UNAUTHORIZED
    assert detail.endswith(
        "what is in front of the server does not take the credentials of `bearer_token_file`"
    )


def test_vllms_own_key_goes_to_v1_in_place_of_the_credentials_for_the_front(tmp_path: Path) -> None:
    (tmp_path / "key").write_text("sk-own")
    answers = guarded(vllm_answers(), header="Authorization", value="Bearer sk-own", paths="/v1")
    with http_server(answers) as (url, seen):
        basic = {"username": "me", "password_file": secret_file(tmp_path)}
        all_well(url, {"api_key_file": str(tmp_path / "key"), "basic_auth": basic})
        sent = {path: headers["Authorization"] for path, headers in seen}
        assert sent == {"/metrics": BASIC, "/version": BASIC, "/v1/models": "Bearer sk-own"}
        failure = checked(url, {"basic_auth": basic})[0].sources[2].failure
    assert failure is not None
    assert failure.reason is FailureReason.UNAUTHORIZED
    assert "if vLLM has a key of its own, set `api_key_file`" in failure.detail


def test_a_private_authority_and_a_client_certificate_open_a_server_that_wants_both(tmp_path: Path) -> None:
    (tmp_path / "ours").mkdir()
    certificate, ours = make_certificate(tmp_path), make_certificate(tmp_path / "ours")
    with http_server(vllm_answers(), certificate=certificate, clients=ours) as (url, _):
        trust = {"ca_file": str(certificate)}
        shown = {"cert_file": str(ours), "key_file": str(ours)}
        all_well(url, {"tls": trust | shown})
        # Whether the server's word about it comes through, or the end of the connection first, is a matter of luck.
        refusal = {FailureReason.TLS, FailureReason.BAD_ANSWER}
        reason, detail = refused(url, {"tls": trust})
        assert reason in refusal
        assert "it may ask for a client certificate: `tls: {cert_file: FILE, key_file: FILE}`" in detail
        reason, detail = refused(url, {"tls": trust | {name: str(certificate) for name in shown}})
        assert reason in refusal
        assert "it may not take the client certificate of `tls: cert_file`" in detail
        reason, detail = refused(url, {"tls": shown})
        assert reason is FailureReason.TLS
        assert "set `tls: {ca_file: /path/to/ca.pem}`" in detail


def test_a_certificate_of_another_name_needs_that_name(tmp_path: Path) -> None:
    certificate = make_certificate(tmp_path, name="DNS:vllm.internal")
    with http_server(vllm_answers(), certificate=certificate) as (url, _):
        reason, detail = refused(url, {"tls": {"ca_file": str(certificate)}})
        assert reason is FailureReason.TLS
        assert "give the name that it has: `tls: {server_name: NAME}`" in detail
        all_well(url, {"tls": {"ca_file": str(certificate), "server_name": "vllm.internal"}})


def test_a_proxy_is_asked_with_its_own_credentials_and_the_server_never_sees_them(tmp_path: Path) -> None:
    passing = {"proxy_basic_auth": {"username": "me", "password_file": secret_file(tmp_path)}}
    with http_server(vllm_answers()) as (url, seen), http_proxy(authorization=BASIC) as (proxy, asked):
        all_well(
            url,
            {"proxy_url": proxy, **passing, "model": str(Path("exporter/kvheadroom/recordings/tiny-llama"))},
        )
        assert f"GET {url}/metrics" in asked
        assert all("Proxy-Authorization" not in headers for _, headers in seen)
        reason, detail = refused(url, {"proxy_url": proxy})
    assert reason is FailureReason.UNAUTHORIZED
    assert detail.endswith("the proxy asks for credentials, or refuses those given; set `proxy_basic_auth`")


def test_an_https_server_behind_a_proxy_is_reached_through_a_tunnel(tmp_path: Path) -> None:
    certificate = make_certificate(tmp_path, name="DNS:vllm.internal")
    settings = {"tls": {"ca_file": str(certificate), "server_name": "vllm.internal"}}
    passing = {"proxy_basic_auth": {"username": "me", "password_file": secret_file(tmp_path)}}
    with (
        http_server(vllm_answers(), certificate=certificate) as (url, seen),
        http_proxy(authorization=BASIC) as (proxy, asked),
    ):
        all_well(url, {"proxy_url": proxy, **passing, **settings})
        assert set(asked) == {f"CONNECT {url.removeprefix('https://')}"}
        assert all("Proxy-Authorization" not in headers for _, headers in seen)
        reason, detail = refused(url, {"proxy_url": proxy, **settings})
        assert reason is FailureReason.UNAUTHORIZED
        assert "set `proxy_basic_auth`" in detail


@pytest.mark.parametrize("loop_factory", [asyncio.new_event_loop, uvloop.new_event_loop])
@pytest.mark.parametrize("proxy_speaks_tls", [False, True])
@pytest.mark.parametrize("server_speaks_tls", [False, True])
def test_a_proxy_works_with_and_without_tls_on_either_side(
    loop_factory: Callable[[], asyncio.AbstractEventLoop],
    *,
    proxy_speaks_tls: bool,
    server_speaks_tls: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    certificate = make_certificate(tmp_path)
    # The proxy's certificate is compared with the system's authorities.
    monkeypatch.setenv("SSL_CERT_FILE", str(certificate))
    default_context.cache_clear()

    async def get(url: str, proxy: str) -> list[object]:
        async with open_session() as session:
            endpoint = Endpoint(url, proxy=Proxy(url=proxy))
            return [
                await fetch(session, endpoint, "/metrics", source="metrics", timeout_seconds=5)
                for _ in range(2)
            ]

    with (
        http_server(vllm_answers(), certificate=certificate if server_speaks_tls else None) as (url, _),
        http_proxy(certificate=certificate if proxy_speaks_tls else None) as (proxy, asked),
        asyncio.Runner(loop_factory=loop_factory) as runner,
    ):
        answers = runner.run(get(url, proxy))
    default_context.cache_clear()
    for answer in answers:
        assert isinstance(answer, Scrape), answer
        assert answer.body == capture("gqa_light_steady")
    # A tunnel is kept for the next request; the requests of an http server come one by one.
    assert len(asked) == (1 if server_speaks_tls else 2)


def test_a_proxy_that_is_not_there_is_told_from_the_server(tmp_path: Path) -> None:
    reason, detail = refused("http://192.0.2.1:8000", {"proxy_url": "http://127.0.0.1:1"})
    assert reason is FailureReason.UNREACHABLE
    assert "the proxy http://127.0.0.1:1 cannot be reached" in detail


def test_proxies_of_the_environment_are_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("http_proxy", "HTTP_PROXY", "ALL_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:1")
    with http_server(vllm_answers()) as (url, _):
        all_well(url, {})


def test_a_server_on_a_unix_socket_is_asked_there(tmp_path: Path) -> None:
    place = tmp_path / "vllm.sock"
    with http_server(vllm_answers(), unix_socket=place) as (_, seen):
        all_well("http://vllm", {"unix_socket": str(place)})
        assert {headers["Host"] for _, headers in seen} == {"vllm"}
    reason, detail = refused("http://vllm", {"unix_socket": str(tmp_path / "nowhere")})
    assert reason is FailureReason.REFUSED
    assert detail == f"GET http://vllm/metrics: there is no socket {tmp_path / 'nowhere'}; is vLLM running?"


def test_the_path_of_the_address_stands_before_every_route() -> None:
    answers = {f"/models/llama{path}": answer for path, answer in vllm_answers().items()}
    with http_server(answers) as (url, seen):
        all_well(f"{url}/models/llama/", {})
    assert {path for path, _ in seen} == set(answers)


def ticks(settings: Mapping[str, object], url: str, *between: Any) -> list[ReplicaAssessment]:
    """The replica after each tick; a step is done before its tick."""

    async def run() -> list[ReplicaAssessment]:
        config = validate_config({"replicas": [{"url": url, "name": "r", "gpu": "CPU", **settings}]}, "test")
        after = []
        async with open_session() as session:
            files = SlowFiles()
            watch = Watch(session, files)
            endpoints = await open_endpoints(config, files, timeout_seconds=5)
            (sampler,) = watch.prepare(config, endpoints, start=False)
            for step in (lambda: None, *between):
                step()
                await sampler.tick(time.time(), wait_for_facts=5)
                after.append(watch.board.fleet.replicas[0])
        return after

    return asyncio.run(run())


def test_a_token_that_was_renewed_on_disk_is_used_within_the_same_scrape(tmp_path: Path) -> None:
    token = tmp_path / "token"
    token.write_text("first")
    plain = vllm_answers() | {"/health": text_answer("")}
    answers = guarded(plain, header="Authorization", value="Bearer first")

    def renew() -> None:
        answers.update(guarded(plain, header="Authorization", value="Bearer second"))
        token.write_text("second\n")

    with http_server(answers) as (url, _):
        before, after = ticks({"bearer_token_file": str(token)}, url, renew)
    for replica in (before, after):
        assert [source.source for source in replica.sources if not source.up] == []
        assert replica.state == "serving"
    assert after.failures_total == ()
    assert after.last_success_at is not None
    assert before.last_success_at is not None
    assert after.last_success_at > before.last_success_at


def test_certificates_that_were_renewed_on_disk_are_used_within_the_same_scrape(tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    certificate, other = make_certificate(tmp_path), make_certificate(tmp_path / "other")
    trusted = tmp_path / "ca.pem"
    trusted.write_bytes(other.read_bytes())
    with http_server(vllm_answers(), certificate=certificate) as (url, _):
        before, after = ticks(
            {"tls": {"ca_file": str(trusted)}}, url, lambda: trusted.write_bytes(certificate.read_bytes())
        )
    assert before.sources[0].failure is not None
    assert before.sources[0].failure.reason is FailureReason.TLS
    assert after.state == "serving"


def test_a_token_file_that_is_gone_when_it_is_needed_again_is_told_with_the_refusal(tmp_path: Path) -> None:
    token = tmp_path / "token"
    token.write_text("first")
    answers = guarded(vllm_answers(), header="Authorization", value="Bearer first")

    def lose() -> None:
        answers.update(guarded(vllm_answers(), header="Authorization", value="Bearer second"))
        token.unlink()

    with http_server(answers) as (url, _):
        failure = ticks({"bearer_token_file": str(token)}, url, lose)[1].sources[0].failure
    assert failure is not None
    assert failure.reason is FailureReason.UNAUTHORIZED
    assert failure.detail.endswith(
        f"; and r: bearer_token_file {token} cannot be read (No such file or directory)"
    )


def fault(settings: Mapping[str, object]) -> str:
    async def run() -> None:
        config = validate_config({"replicas": [{"url": "https://h", "name": "r", **settings}]}, "test")
        await open_endpoints(config, SlowFiles(), timeout_seconds=5)

    with pytest.raises(ConfigError) as error:
        asyncio.run(run())
    assert SECRET not in str(error.value)
    return str(error.value)


def test_each_fault_of_a_file_is_one_sentence_with_the_file_and_the_setting(tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    good, other = make_certificate(tmp_path), make_certificate(tmp_path / "other")
    missing, empty, lines, latin = (tmp_path / name for name in ("missing", "empty", "lines", "latin"))
    empty.write_text("\n")
    lines.write_text(f"{SECRET}\nX-Injected: 1\n")
    latin.write_bytes(b"\xff\xfe")
    garbled = tmp_path / "garbled"
    garbled.write_text("-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n")
    encrypted = tmp_path / "encrypted"
    encrypted.write_text("-----BEGIN ENCRYPTED PRIVATE KEY-----\nAAAA\n-----END ENCRYPTED PRIVATE KEY-----\n")

    def pair(cert: Path, key: Path) -> dict[str, object]:
        return {"tls": {"cert_file": str(cert), "key_file": str(key)}}

    basic = {"username": "me", "password_file": str(lines)}
    assert [
        fault({"bearer_token_file": str(missing)}),
        fault({"bearer_token_file": str(empty)}),
        fault({"bearer_token_file": SECRET}),
        fault({"basic_auth": basic}),
        fault({"headers": {"X-Key": {"file": str(latin)}}}),
        fault({"proxy_url": "http://p:1", "proxy_basic_auth": basic}),
        fault({"api_key_file": str(tmp_path)}),
        fault({"tls": {"ca_file": str(lines)}}),
        fault({"tls": {"ca_file": str(garbled)}}),
        fault(pair(lines, good)),
        fault(pair(good, lines)),
        fault(pair(good, other)),
        fault(pair(good, encrypted)),
        fault(pair(garbled, good)),
    ] == [
        f"r: bearer_token_file {missing} cannot be read (No such file or directory)",
        f"r: bearer_token_file {empty} is empty",
        "r: bearer_token_file (not shown) cannot be read (No such file or directory)",
        f"r: basic_auth.password_file {lines} holds more than one line",
        f"r: headers.X-Key.file {latin} is no text",
        f"r: proxy_basic_auth.password_file {lines} holds more than one line",
        f"r: api_key_file {tmp_path} cannot be read (it is no regular file)",
        f"r: tls.ca_file {lines} holds no certificate (PEM)",
        f"r: tls.ca_file {garbled} holds a certificate that cannot be read",
        f"r: tls.cert_file {lines} holds no certificate (PEM)",
        f"r: tls.key_file {lines} holds no private key (PEM)",
        f"r: tls.cert_file {good} and key_file {other} do not belong together",
        f"r: tls.key_file {encrypted} is encrypted; give the key without a passphrase",
        f"r: tls.cert_file {garbled} and key_file {good} cannot be used",
    ]


def test_an_authorities_file_may_hold_comments_in_any_language(tmp_path: Path) -> None:
    certificate = make_certificate(tmp_path)
    bundle = tmp_path / "bundle.pem"
    bundle.write_text("# Zertifizierungsstelle Zürich\n" + certificate.read_text(), encoding="utf-8")
    with http_server(vllm_answers(), certificate=certificate) as (url, _):
        all_well(url, {"tls": {"ca_file": str(bundle)}})


def test_an_endpoint_shows_no_secret_and_equals_one_of_the_same_files(tmp_path: Path) -> None:
    certificate = make_certificate(tmp_path)
    basic = {"username": "me", "password_file": secret_file(tmp_path)}
    settings = {
        "url": "https://h:1",
        "api_key_file": secret_file(tmp_path),
        "basic_auth": basic,
        "headers": {"X-Key": {"file": secret_file(tmp_path)}},
        "tls": {"cert_file": str(certificate), "key_file": str(certificate)},
        "proxy_url": "http://p:1",
        "proxy_basic_auth": basic,
    }
    (replica,) = validate_config({"replicas": [settings]}, "test").replicas

    async def run() -> None:
        first = await open_endpoint(replica, SlowFiles(), timeout_seconds=5)
        second = await open_endpoint(replica, SlowFiles(), timeout_seconds=5)
        assert first == second
        assert SECRET not in repr(first)
        assert BASIC not in repr(first)
        (tmp_path / "secret").write_text("renewed")
        third = await open_endpoint(replica, SlowFiles(), timeout_seconds=5, known=first)
        assert third != first
        assert third.tls is first.tls

    asyncio.run(run())


def test_the_daemon_shows_no_secret_anywhere_while_it_is_turned_away(tmp_path: Path) -> None:
    settings = {
        "name": "r",
        "basic_auth": {"username": "me", "password_file": secret_file(tmp_path)},
        "headers": {"X-Key": {"file": secret_file(tmp_path)}, "X-Written-Out": SECRET},
    }
    with http_server({"/metrics": text_answer("no", status=403)}) as (url, seen):
        text = json.dumps([{"url": url, **settings}])
        with daemon("serve", "--config", config_file(tmp_path, f"replicas: {text}")) as serve:
            wait_for(
                lambda: serve.value("kvheadroom_source_failures_total", reason="unauthorized"), "the refusal"
            )
            shown = serve.pages() + serve.get("/metrics").text + serve.get("/api/v1/status").text
            shown += serve.output
    assert seen[0][1]["Authorization"] == BASIC
    assert "does not take the credentials of `basic_auth`" in shown
    assert SECRET not in shown
    assert BASIC.removeprefix("Basic ") not in shown


def test_targets_of_the_command_line_leave_the_access_of_the_files_replicas_as_it_is(tmp_path: Path) -> None:
    settings = {
        "url": "https://h:1",
        "basic_auth": {"username": "me", "password_file": secret_file(tmp_path)},
        "headers": {"X-Key": {"file": secret_file(tmp_path)}, "X-Plain": "a"},
        "tls": {"server_name": "vllm.internal"},
        "proxy_url": "http://p:1",
    }
    file = config_file(tmp_path, f"replicas: {json.dumps([settings])}")
    alone, with_target = _config(file, []), _config(file, ["http://other:2"])
    assert with_target.replicas[0] == alone.replicas[0]
    assert [replica.url for replica in with_target.replicas] == ["https://h:1", "http://other:2"]


def test_a_start_with_a_file_at_fault_ends_with_2_and_its_sentence(tmp_path: Path) -> None:
    (tmp_path / "ca.pem").write_text("no certificate")
    settings = {"url": "https://127.0.0.1:1", "name": "r", "tls": {"ca_file": str(tmp_path / "ca.pem")}}
    file = config_file(tmp_path, f"replicas: {json.dumps([settings])}")
    for command in ("serve", "check"):
        run = subprocess.run(
            [*COMMAND, command, "--config", str(file)],
            capture_output=True,
            text=True,
            check=False,
            timeout=20,
        )
        assert (run.returncode, run.stdout) == (2, "")
        assert run.stderr == f"kvheadroom: r: tls.ca_file {tmp_path / 'ca.pem'} holds no certificate (PEM)\n"


def test_a_reload_with_a_file_at_fault_changes_nothing_and_says_why(tmp_path: Path) -> None:
    token = tmp_path / "token"
    token.write_text("first")
    settings = {"url": "http://127.0.0.1:1", "name": "r", "bearer_token_file": str(token)}
    file = config_file(tmp_path, f"replicas: {json.dumps([settings])}")

    async def run() -> None:
        config, files = load_config(file), SlowFiles()
        async with open_session() as session:
            watch = Watch(session, files)
            endpoints = await open_endpoints(config, files, timeout_seconds=5)
            (before,) = watch.prepare(config, endpoints, start=False)
            token.write_text("")
            file.write_text(file.read_text().replace('"r"', '"other"'))
            await _reload(watch, ConfigFile(file, lambda: load_config(file)), files)
            status = watch.board.fleet.reload
            assert status is not None
            assert status.fault == f"other: bearer_token_file {token} is empty"
            assert [replica.replica for replica in watch.board.fleet.replicas] == ["r"]
            # The same config and files once more leave the sampler as it is.
            assert watch.prepare(config, endpoints, start=False) == [before]
            await watch.close()

    asyncio.run(run())
