"""The config file: what is accepted, and the sentence for each fault."""

import os
import re
from pathlib import Path

import pytest
import yaml

from kvheadroom.cli import _config
from kvheadroom.config import Config, ConfigError, ReplicaConfig, load_config, validate_config


def load(tmp_path: Path, text: str) -> Config:
    file = tmp_path / "c.yaml"
    file.write_text(text)
    return load_config(file)


def fault(tmp_path: Path, text: str) -> str:
    with pytest.raises(ConfigError) as error:
        load(tmp_path, text)
    return str(error.value).replace(str(tmp_path), "")


def test_every_setting_is_read(tmp_path: Path) -> None:
    config = load(
        tmp_path,
        """
scrape_interval: 500ms
session_tokens: [131072, 262144]
idle_times: [30s, 2h]
tier_sizes: [64GiB, 500GB]
overhead_gb: 7.5
calibration_file: /var/lib/kvheadroom/calibration.json
replicas:
  - url: http://a:8000/
    name: glm-a
    model: /models/glm
    weights_bytes: 464115778000
    gpu: b200
    gpus: [GPU-1a2b3c4d-0000-1111-2222-333344445555]
    hbm_bytes: 191000000000
    overhead_gb: 3
    api_key_file: /run/secrets/key
    flags: {tensor_parallel_size: 8, kv_cache_dtype: fp8, gpu_memory_utilization: 0.95}
  - url: https://b/prefix/
""",
    )
    assert config.scrape_interval == 0.5
    assert config.session_tokens == (131072, 262144)
    assert config.idle_times == (30.0, 7200.0)
    assert config.tier_sizes == (64 * 2**30, 500 * 10**9)
    assert config.overhead_gb == 7.5
    assert config.calibration_file == Path("/var/lib/kvheadroom/calibration.json")
    a, b = config.replicas
    assert (a.overhead_gb, b.overhead_gb) == (3.0, None)
    assert (a.replica, a.url, a.gpu) == ("glm-a", "http://a:8000", "B200")
    assert a.gpus == ("GPU-1a2b3c4d-0000-1111-2222-333344445555",)
    assert a.flags.model_dump(exclude_none=True) == {
        "tensor_parallel_size": 8,
        "kv_cache_dtype": "fp8",
        "gpu_memory_utilization": 0.95,
    }
    assert (b.replica, b.url) == ("b/prefix", "https://b/prefix")


@pytest.mark.parametrize(
    ("text", "gpus"),
    [
        ("[GPU-1A2B3C4D-00ff, MIG-1A2B3C4D-00ff]", ("GPU-1a2b3c4d-00ff", "MIG-1a2b3c4d-00ff")),
        ("[MIG-GPU-1A2B3C4D-00ff/3/0]", ("MIG-GPU-1a2b3c4d-00ff/3/0",)),
        ("[1, 0]", (1, 0)),
        ("'3,1'", (3, 1)),
        ("'GPU-1a2b3c4d, MIG-1a2b3c4d'", ("GPU-1a2b3c4d", "MIG-1a2b3c4d")),
        ("[]", ()),
    ],
)
def test_gpus_are_uuids_mig_uuids_or_indices_as_a_list_or_as_in_cuda_visible_devices(
    tmp_path: Path, text: str, gpus: tuple[str | int, ...]
) -> None:
    config = load(tmp_path, f"replicas: [{{url: 'http://h:1', gpus: {text}}}]")
    assert config.replicas[0].gpus == gpus


def test_defaults_are_those_of_the_reference(tmp_path: Path) -> None:
    config = load(tmp_path, "replicas: [{url: 'http://h:1'}]")
    assert (config.scrape_interval, config.session_tokens) == (5.0, (262144,))
    assert config.idle_times == (300.0, 2700.0)
    assert config.tier_sizes == (64 * 10**9, 128 * 10**9, 256 * 10**9)
    assert (config.overhead_gb, config.calibration_file) == (None, None)
    assert config.replicas[0].replica == "h:1"


REPLICA = "replicas: [{url: 'http://h:1'}]\n"


def test_the_config_is_no_place_for_samples(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path)
    path = tmp_path / "kvheadroom.yaml"
    path.write_text(f"{REPLICA}calibration_file: {tmp_path}/link/kvheadroom.yaml\n")
    with pytest.raises(
        ConfigError, match="calibration_file: this is the config itself; name a file of its own"
    ):
        load_config(path)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "/c.yaml: there is nothing to watch; it needs at least `replicas: [{url: http://host:8000}]`, or `process_discovery: {}` for the servers of this machine"),
        ("[1]", "/c.yaml: there is nothing to watch; it needs at least `replicas: [{url: http://host:8000}]`, or `process_discovery: {}` for the servers of this machine"),
        ("replicas: []", "/c.yaml: there is nothing to watch; it needs at least `replicas: [{url: http://host:8000}]`, or `process_discovery: {}` for the servers of this machine"),
        ("{}", "/c.yaml: there is nothing to watch; it needs at least `replicas: [{url: http://host:8000}]`, or `process_discovery: {}` for the servers of this machine"),
        (REPLICA + "scrape_intervall: 5s", "/c.yaml: scrape_intervall: there is no such setting; did you mean `scrape_interval`?"),
        (REPLICA + "scrape_interval: 5", "/c.yaml: scrape_interval: 5 is no duration; write a number with its unit, e.g. 5s or 1m"),
        (REPLICA + "scrape_interval: 5 minutes", "/c.yaml: scrape_interval: '5 minutes' is no duration; write a number with its unit, e.g. 5s or 1m"),
        (REPLICA + "scrape_interval: 1ms", "/c.yaml: scrape_interval: input should be greater than or equal to 0.1, got '1ms'"),
        ("replicas: [{url: 'http://h:1', gpus: ['0']}]", "/c.yaml: replicas[0].gpus[0]: '0' is no UUID of a GPU or MIG device and no index; `nvidia-smi -L` lists them, e.g. GPU-1a2b3c4d-..., MIG-1a2b3c4d-... or 0"),
        ("replicas: [{url: 'http://h:1', gpus: [MIG-1/0/0]}]", "/c.yaml: replicas[0].gpus[0]: 'MIG-1/0/0' is no UUID of a GPU or MIG device and no index; `nvidia-smi -L` lists them, e.g. GPU-1a2b3c4d-..., MIG-1a2b3c4d-... or 0"),
        ("replicas: [{url: 'http://h:1', gpus: [-1]}]", "/c.yaml: replicas[0].gpus[0]: '-1' is no UUID of a GPU or MIG device and no index; `nvidia-smi -L` lists them, e.g. GPU-1a2b3c4d-..., MIG-1a2b3c4d-... or 0"),
        ("replicas: [{url: 'http://h:1', gpus: [true]}]", "/c.yaml: replicas[0].gpus[0]: 'True' is no UUID of a GPU or MIG device and no index; `nvidia-smi -L` lists them, e.g. GPU-1a2b3c4d-..., MIG-1a2b3c4d-... or 0"),
        ("replicas: [{url: 'http://h:1', gpus: ''}]", "/c.yaml: replicas[0].gpus[0]: '' is no UUID of a GPU or MIG device and no index; `nvidia-smi -L` lists them, e.g. GPU-1a2b3c4d-..., MIG-1a2b3c4d-... or 0"),
        ("replicas: [{url: 'http://h:1', gpus: '0,'}]", "/c.yaml: replicas[0].gpus[1]: '' is no UUID of a GPU or MIG device and no index; `nvidia-smi -L` lists them, e.g. GPU-1a2b3c4d-..., MIG-1a2b3c4d-... or 0"),
        ("replicas: [{url: 'http://h:1', gpus: [0, 0]}]", "/c.yaml: replicas[0].gpus: 0 is given twice"),
        (REPLICA + "calibration_file: ''", "/c.yaml: calibration_file: '.' is no file's name"),
        (REPLICA + "calibration_file: /", "/c.yaml: calibration_file: '/' is no file's name"),
        (REPLICA + "calibration_file: 5", "/c.yaml: calibration_file: the path of a file is needed, got 5"),
        ("replicas: [{url: 'http://h:1', overhead_gb: -1}]", "/c.yaml: replicas[0].overhead_gb: input should be greater than or equal to 0, got -1"),
        (REPLICA + "idle_times: [5m, 999ms]", "/c.yaml: idle_times[1]: input should be greater than or equal to 1, got '999ms'"),
        (REPLICA + "tier_sizes: [64]", "/c.yaml: tier_sizes[0]: 64 is no size; write a number with its unit, e.g. 64GB or 64GiB"),
        (REPLICA + "tier_sizes: [64GB, 1kB]", "/c.yaml: tier_sizes[1]: input should be greater than or equal to 1000000, got '1kB'"),
        (REPLICA + "idle_times: [721h]", "/c.yaml: idle_times[0]: input should be less than or equal to 2592000, got '721h'"),
        (REPLICA + "session_tokens: [0]", "/c.yaml: session_tokens[0]: input should be greater than 0, got 0"),
        (REPLICA + "session_tokens: ['256K']", "/c.yaml: session_tokens[0]: a whole number is needed, got '256K'"),
        ("replicas: [{url: 'host:8000'}]", "/c.yaml: replicas[0].url: 'host:8000' is no server's address; write e.g. http://host:8000"),
        ("replicas: [{url: 'http://u:p@h:1'}]", "/c.yaml: replicas[0].url: an address may not hold a user or password: it is shown on pages and in metrics"),
        ("replicas: [{url: 'http://u@h:1'}]", "/c.yaml: replicas[0].url: an address may not hold a user or password: it is shown on pages and in metrics"),
        ('replicas: [{url: "http://h:1", name: "a\\nb"}]', "/c.yaml: replicas[0].name: a name is one line of characters that can be printed"),
        ("replicas: [{url: 'http://h h:1/?s3cret'}]", "/c.yaml: replicas[0].url: 'http://h h:1/' is no server's address; write e.g. http://host:8000"),
        ("replicas: [{url: 'http://h:1/?a=b'}]", "/c.yaml: replicas[0].url: an address may not have a query (?...) or fragment (#...)"),
        ("replicas: [{url: 'http://ho st:1'}]", "/c.yaml: replicas[0].url: 'http://ho st:1' is no server's address; write e.g. http://host:8000"),
        ("replicas: [{url: 'http://a..b:1'}]", "/c.yaml: replicas[0].url: 'http://a..b:1' is no server's address; write e.g. http://host:8000"),
        ("replicas: [{url: 'http://[::1'}]", "/c.yaml: replicas[0].url: 'http://[::1' is no server's address; write e.g. http://host:8000"),
        ("replicas: [{url: 'http://h:1', model: ''}]", "/c.yaml: replicas[0].model: string should have at least 1 character, got ''"),
        ("replicas: [{url: 'http://h:1', flags: 5}]", "/c.yaml: replicas[0].flags: a mapping (`key: value`) is needed, got 5"),
        ("replicas: 5", "/c.yaml: replicas: a list (`[a, b]`) is needed, got 5"),
        ("replicas: [{url: 'http://h:1', gpu: CPU, hbm_bytes: 5}]", "/c.yaml: replicas[0]: `gpu: CPU` has neither hbm_bytes nor gpus; leave one of them out"),
        ("replicas: [{url: 'http://h:99999'}]", "/c.yaml: replicas[0].url: 'http://h:99999' is no server's address; write e.g. http://host:8000"),
        ("replicas: [{url: 'http://h:1/metrics'}]", "/c.yaml: replicas[0].url: give the server's address without /metrics"),
        ("replicas: [{url: 'http://h:1', gpus: [GPU-1A2B3C4D, GPU-1a2b3c4d]}]", "/c.yaml: replicas[0].gpus: GPU-1a2b3c4d is given twice"),
        ("replicas: [{url: 'http://h:1', basic_auth: {username: a, password: S}}]", "/c.yaml: replicas[0].basic_auth.password_file: it is needed\n/c.yaml: replicas[0].basic_auth.password: there is no such setting; did you mean `password_file`?"),
        ("replicas: [{url: 'http://h:1', basic_auth: {username: 'a:b', password_file: /f}}]", "/c.yaml: replicas[0].basic_auth.username: a user's name is one line without a colon"),
        ("replicas: [{url: 'http://h:1', basic_auth: {username: a, password_file: /f}, bearer_token_file: /t}]", "/c.yaml: replicas[0]: `basic_auth` and `bearer_token_file` both fill the header Authorization; leave one out"),
        ("replicas: [{url: 'http://h:1', tls: {ca_file: /f}}]", "/c.yaml: replicas[0]: `tls` is for servers at https://; write `url: https://...`, or leave it out"),
        ("replicas: [{url: 'https://h:1', tls: {cert_file: /f}}]", "/c.yaml: replicas[0].tls: `cert_file` and `key_file` go together; give both"),
        ("replicas: [{url: 'https://h:1', tls: {server_name: 'h:1'}}]", "/c.yaml: replicas[0].tls.server_name: a server's name is a host name or an IP address, without a port"),
        ("replicas: [{url: 'https://h:1', tls: {insecure_skip_verify: true}}]", "/c.yaml: replicas[0].tls.insecure_skip_verify: there is no such setting; allowed here: ca_file, cert_file, key_file, server_name"),
        ("replicas: [{url: 'http://h:1', proxy_basic_auth: {username: a, password_file: /f}}]", "/c.yaml: replicas[0]: `proxy_basic_auth` is for a proxy; give its address as `proxy_url`"),
        ("replicas: [{url: 'http://h:1', proxy_url: 'http://proxy:1/x'}]", "/c.yaml: replicas[0].proxy_url: this is no proxy's address; write e.g. http://proxy:3128"),
        ("replicas: [{url: 'http://h:1', proxy_url: 'http://u:S3CRET@proxy:1'}]", "/c.yaml: replicas[0].proxy_url: give the proxy's user and password with `proxy_basic_auth`, not in its address"),
        ("replicas: [{url: 'https://h:1', unix_socket: /run/x}]", "/c.yaml: replicas[0]: a `unix_socket` is reached directly and without TLS; write `url: http://localhost`"),
        ("replicas: [{url: 'http://h:1', unix_socket: run/x}]", "/c.yaml: replicas[0].unix_socket: the absolute path of a socket is needed, of at most 107 bytes"),
        ("replicas: [{url: 'http://h:1', headers: [a]}]", "/c.yaml: replicas[0].headers: a mapping (`Name: value`) is needed"),
        ("replicas: [{url: 'http://h:1', headers: {authorization: S3CRET}}]", "/c.yaml: replicas[0].headers: authorization may not be set here; use `basic_auth` or `bearer_token_file`"),
        ("replicas: [{url: 'http://h:1', headers: {Content-Length: '5'}}]", "/c.yaml: replicas[0].headers: Content-Length may not be set here"),
        ("replicas: [{url: 'http://h:1', headers: {X A: S3CRET}}]", "/c.yaml: replicas[0].headers: a header's name has letters, digits and hyphens only"),
        ("replicas: [{url: 'http://h:1', headers: {X-A: a, x-a: b}}]", "/c.yaml: replicas[0].headers: X-A and x-a are the same header"),
        ('replicas: [{url: "http://h:1", headers: {X-A: "S3CRET\\nX-B: c"}}]', "/c.yaml: replicas[0].headers: the value of X-A must be one line of printable ASCII, or {file: PATH}"),
        ("replicas: [{url: 'http://h:1', headers: {X-A: 12345678}}]", "/c.yaml: replicas[0].headers: the value of X-A must be one line of printable ASCII, or {file: PATH}"),
        ("http_sd_configs: 'http://h/x?token=S3CRET'", "/c.yaml: http_sd_configs: a list (`[a, b]`) is needed"),
        ("dcgm_exporters: ['http://u:S3CRET@h']", "/c.yaml: dcgm_exporters[0]: a mapping (`key: value`) is needed"),
        ("replicas: [{url: 'http://h:1', basic_auth: 'me:S3CRET'}]", "/c.yaml: replicas[0].basic_auth: a mapping (`key: value`) is needed"),
        ("replicas: [{url: 'http://h:1', bearer_token_file: 12345678}]", "/c.yaml: replicas[0].bearer_token_file: the path of a file is needed"),
        *(
            (f"shard: {shard}\nreplicas: [{{url: 'http://h:1'}}]",
             f"/c.yaml: shard: {shown} is no share of the servers; write I/N, from 0/N to (N-1)/N, e.g. 0/4 (N is at most 1000)")
            for shard, shown in (("4/4", "'4/4'"), ("1", "'1'"), ("0/0", "'0/0'"), ("'0/2000'", "'0/2000'"), ("-1/4", "'-1/4'"))
        ),
        ("replicas: [{name: a}]", "/c.yaml: replicas[0].url: it is needed"),
        ("replicas: [{url: 'http://h:1', gpu: B999}]", "/c.yaml: replicas[0].gpu: 'B999' is not in the catalogue (A100, GH200, A100-40GB, A100-80GB, A800-80GB, A10, A30, A40, RTXA6000, RTX3090, L4, L40, L40S, RTX4090, RTX6000Ada, H100, H100-PCIe, H100-NVL, H20, H200, H200-NVL, GH200-96GB, GH200-144GB, B200, GB200, B300, GB300, RTX5090, RTXPRO6000, CPU); for another GPU leave `gpu` out and set `hbm_bytes`"),
        ("replicas: [{url: 'http://h:1', gpu: T4}]", "/c.yaml: replicas[0].gpu: 'T4': compute capability 7.5 is not modelled; leave `gpu` out, and what vLLM reports is shown without it"),
        ("replicas: [{url: 'http://h:1', flags: {tensor-parallel-size: 2}}]", "/c.yaml: replicas[0].flags.tensor-parallel-size: there is no such setting; did you mean `tensor_parallel_size`?"),
        ("replicas: [{url: 'http://h:1', flags: {tensor_parallel_size: '8'}}]", "/c.yaml: replicas[0].flags.tensor_parallel_size: a whole number is needed, got '8'"),
        ("replicas: [{url: 'http://h:1', flags: {pipeline_parallel_size: 65537}}]", "/c.yaml: replicas[0].flags.pipeline_parallel_size: input should be less than or equal to 65536, got 65537"),
        ("replicas: [{url: 'http://h:1', flags: {gpu_memory_utilization: 92}}]", "/c.yaml: replicas[0].flags.gpu_memory_utilization: input should be less than or equal to 1, got 92"),
        ("replicas: [{url: 'http://h:1'}, {url: 'http://h:1/'}]", "/c.yaml: replicas[0] and replicas[1] are both called 'h:1'; give each its own `name`"),
    ],
)  # fmt: skip
def test_a_fault_names_its_place_and_what_is_allowed(tmp_path: Path, text: str, message: str) -> None:
    assert fault(tmp_path, text) == message


def test_no_secret_of_a_faulty_config_is_repeated(tmp_path: Path) -> None:
    told = fault(
        tmp_path, "replicas: [{uri: x, api_key: S3CRET}, {url: 'ftp://me:S3CRET@h'}, {S3: {a: S3CRET}}]"
    )
    assert "api_key: there is no such setting; did you mean `api_key_file`?" in told
    assert "S3CRET" not in told
    assert "S3CRET" not in fault(tmp_path, "replicas: [{url: x, api_key: S3CRET: y]")


def test_a_model_folder_is_meant_as_in_a_shell(tmp_path: Path) -> None:
    config = load(tmp_path, "replicas: [{url: 'http://[::1]:8000', model: ~/models/x}]")
    assert config.replicas[0].model == str(Path.home() / "models" / "x")
    assert config.replicas[0].replica == "[::1]:8000"


def test_several_faults_are_all_told(tmp_path: Path) -> None:
    assert len(fault(tmp_path, "a: 1\nb: 2\nreplicas: [{url: x}]").splitlines()) == 3


@pytest.mark.parametrize(
    ("text", "word"),
    [
        ("a: 1\na: 2", "the key `a` is given twice"),
        ("a: &x [1]\nb: *x", "aliases (*name) are not allowed here"),
        ("a: [1", "is no valid YAML"),
        ("a: !!python/object/apply:os.system [x]", "is no valid YAML"),
        ("[" * 10_000, "is "),
        ("a: 2024-13-45", "is no valid YAML"),
        ("a: !!int x", "is no valid YAML"),
        ("a: !!int ''", "is no valid YAML"),
        ("a: !!bool foo", "is no valid YAML"),
        ("a: !!timestamp x", "is no valid YAML"),
    ],
)
def test_yaml_that_would_surprise_is_refused(tmp_path: Path, text: str, word: str) -> None:
    assert word in fault(tmp_path, text)


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"nowhere\.yaml: cannot be read"):
        load_config(tmp_path / "nowhere.yaml")
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(ConfigError, match="it is no regular file"):
        load_config(tmp_path / "pipe")
    with (tmp_path / "huge").open("wb") as sparse:
        sparse.truncate(1 << 30)
    with pytest.raises(ConfigError, match="it is larger than 4 MiB"):
        load_config(tmp_path / "huge")
    (tmp_path / "latin").write_bytes(b"\xff\xfe")
    with pytest.raises(ConfigError, match="is not UTF-8 text"):
        load_config(tmp_path / "latin")


def test_targets_of_the_command_line_are_checked_like_the_file() -> None:
    with pytest.raises(ConfigError, match=r"--target: replicas\[0\]\.url"):
        validate_config({"replicas": [{"url": "nonsense"}]}, "--target")


def test_targets_of_the_command_line_stand_beside_all_that_a_config_says(tmp_path: Path) -> None:
    file = tmp_path / "c.yaml"
    file.write_text(
        "scrape_interval: 7s\n"
        "replicas: [{url: 'http://a:1', labels: {team: x}, headers: {X-Scope: y}}]\n"
        "file_sd_configs: [{files: [/etc/a.yml], refresh_interval: 90s, replica: {gpus: [0]}}]\n"
        "http_sd_configs: [{url: 'http://h/x?token=s3cret', refresh_interval: 200ms}]\n"
    )
    before, after = load_config(file), _config(file, ["http://b:2/"])
    assert after.replicas == (*before.replicas, ReplicaConfig(url="http://b:2"))
    assert after.model_copy(update={"replicas": before.replicas}) == before
    assert _config(file, [], "1/4") == before.model_copy(update={"shard": "1/4"})
    with pytest.raises(ConfigError, match=r"with the command line: shard: '4/4' is no share of the servers"):
        _config(file, [], "4/4")


def test_every_config_in_the_documentation_is_valid() -> None:
    replicas = {}
    for page in sorted((Path(__file__).parents[1] / "docs").rglob("*.md")):
        blocks = re.findall(r"```yaml\n(.*?)```", page.read_text(), re.DOTALL)
        configs = [
            block for block in blocks if re.search(r"^replicas:|^# kvheadroom.yaml", block, re.MULTILINE)
        ]
        if configs:
            told = [validate_config(yaml.safe_load(block), page.name) for block in configs]
            replicas[page.name] = [len(config.replicas) for config in told]
            assert [config.discovers for config in told] == ["sd_configs:" in block for block in configs]
    assert replicas == {
        "calibration.md": [1],
        "configuration.md": [2, 0, 2, 5],
        "quickstarts.md": [2],
        "warm-sessions.md": [1],
    }


def test_servers_of_this_machine_are_found_where_the_config_says_so(tmp_path: Path) -> None:
    empty = load(tmp_path, "process_discovery:\n").process_discovery
    assert empty is not None
    assert (empty.refresh_interval, load(tmp_path, REPLICA).process_discovery) == (5.0, None)
    said = load(tmp_path, "process_discovery: {refresh_interval: 1m, replica: {gpu: H200, labels: {a: b}}}")
    assert said.process_discovery is not None
    assert (said.process_discovery.refresh_interval, said.process_discovery.replica.gpu) == (60.0, "H200")
    assert "scheme" in fault(tmp_path, "process_discovery: {replica: {scheme: https}}")
    assert "server" in fault(tmp_path, "replicas: [{url: 'http://h:1', server: {}}]")


def test_a_config_that_was_read_can_be_read_once_more_with_every_time_in_it(tmp_path: Path) -> None:
    sources = "file_sd_configs: [{files: [/a/*.yml], refresh_interval: 200ms}]\nprocess_discovery: {refresh_interval: 1m}\n"
    config = load(tmp_path, sources + "scrape_interval: 2s\n")
    assert validate_config(config.model_dump(exclude_unset=True), "again") == config
