"""The compose file and what it mounts: that it hangs together, and that Prometheus and Alertmanager take their files."""

import shutil
import subprocess
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
import yaml

from tests.conftest import unavailable
from tests.dashboards import expressions
from tests.dashboards.test_rules import inhibit_rules_of
from tests.end_to_end.prometheus_server import Binaries

ROOT = Path(__file__).parents[1]
DEPLOY = ROOT / "deploy"


def read(name: str) -> dict[str, Any]:
    document: dict[str, Any] = yaml.safe_load((DEPLOY / name).read_text())
    return document


SERVICES: dict[str, dict[str, Any]] = read("compose.yaml")["services"]
DATASOURCE = read("grafana/provisioning/datasources/prometheus.yaml")["datasources"][0]
PROVIDER = read("grafana/provisioning/dashboards/kvheadroom.yaml")["providers"][0]


def mounts(service: str) -> dict[str, Path]:
    """Path in the container -> what of the clone is there."""
    split = [mount.split(":") for mount in SERVICES[service]["volumes"]]
    assert all(parts[2:] == ["ro"] for parts in split if parts[0].startswith("."))
    return {parts[1]: (DEPLOY / parts[0]).resolve() for parts in split if parts[0].startswith(".")}


def listens(service: str) -> str:
    """`host:port` of the command line."""
    command = SERVICES[service]["command"]
    if service == "kvheadroom":
        return str(command[command.index("--web.listen-address") + 1])
    [address] = [part for part in command if part.startswith("--web.listen-address=")]
    return str(address.partition("=")[2])


def test_everything_is_on_loopback() -> None:
    for name, service in SERVICES.items():
        assert service["network_mode"] == "host"
        if name != "grafana":
            assert listens(name).startswith("127.0.0.1:")
    assert SERVICES["grafana"]["environment"]["GF_SERVER_HTTP_ADDR"] == "127.0.0.1"


def test_what_is_built_and_mounted_exists() -> None:
    assert (DEPLOY / SERVICES["kvheadroom"]["build"] / "Dockerfile").is_file()
    for service in ("prometheus", "alertmanager", "grafana"):
        for path in mounts(service).values():
            assert path.exists()
            assert path.is_relative_to(ROOT)


def test_images_are_pinned_to_a_release() -> None:
    images = [service["image"] for service in SERVICES.values() if "image" in service]
    assert len(images) == 3
    for image in images:
        assert image.partition(":")[2].removeprefix("v")[0].isdigit()


def test_each_asks_the_next_where_it_listens() -> None:
    prometheus = read("prometheus.yml")
    [scrape] = prometheus["scrape_configs"]
    assert scrape["static_configs"] == [{"targets": [listens("kvheadroom")]}]
    [alertmanager] = prometheus["alerting"]["alertmanagers"]
    assert alertmanager["static_configs"] == [{"targets": [listens("alertmanager")]}]
    assert urlsplit(DATASOURCE["url"]).netloc == listens("prometheus")


def test_grafana_knows_the_scrape_interval() -> None:
    # It makes the range of increases of it.
    assert DATASOURCE["jsonData"]["timeInterval"] == read("prometheus.yml")["global"]["scrape_interval"]
    assert DATASOURCE["type"] == "prometheus"


def test_grafana_loads_the_committed_dashboards_and_begins_with_the_fleet() -> None:
    folder = mounts("grafana")[PROVIDER["options"]["path"]]
    assert {file.stem for file in folder.glob("*.json")} == {
        "kvheadroom-fleet",
        "kvheadroom-engine",
        "kvheadroom-prediction",
        "kvheadroom-warm",
    }
    home = Path(SERVICES["grafana"]["environment"]["GF_DASHBOARDS_DEFAULT_HOME_DASHBOARD_PATH"])
    assert str(home.parent) == PROVIDER["options"]["path"]
    assert (folder / home.name).is_file()
    assert PROVIDER["allowUiUpdates"] is False


@pytest.fixture
def prometheus_folder(tmp_path: Path) -> Path:
    """`/etc/prometheus` as the container has it."""
    for target, source in mounts("prometheus").items():
        place = tmp_path / target.removeprefix("/etc/prometheus/")
        if source.is_dir():
            shutil.copytree(source, place)
        else:
            shutil.copy2(source, place)
    return tmp_path


def test_prometheus_takes_its_config_with_all_rules(
    each_prometheus: Binaries, prometheus_folder: Path
) -> None:
    code, output = expressions.run_promtool(
        each_prometheus.promtool, "check", "config", prometheus_folder / "prometheus.yml"
    )
    assert code == 0, output
    assert "2 rule files found" in output


def test_alertmanager_takes_its_config() -> None:
    amtool = shutil.which("amtool")
    if amtool is None:
        unavailable(
            "no amtool on the PATH; tests/system_packages.sh installs Debian's prometheus-alertmanager"
        )
    checked = subprocess.run(
        [amtool, "check-config", DEPLOY / "alertmanager.yml"], capture_output=True, text=True, check=False
    )
    assert checked.returncode == 0, checked.stderr
    assert "3 inhibit rules" in checked.stdout


def test_alertmanager_is_silent_about_what_the_quickstart_says() -> None:
    config = read("alertmanager.yml")
    assert config["inhibit_rules"] == inhibit_rules_of(ROOT / "docs" / "quickstarts.md")
    [info] = config["route"]["routes"]
    assert (info["matchers"], info["receiver"]) == (['severity = "info"'], "nobody")
    assert config["route"]["group_wait"] == "0s"
