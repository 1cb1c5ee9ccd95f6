"""A real Alertmanager on loopback, and the webhook that it notifies."""

import contextlib
import json
import shutil
import time
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any, Literal

import requests

from tests.doubles.http_server import http_server, text_answer
from tests.end_to_end.server_process import ServerProcess, free_loopback_port

READY_LIMIT_SECONDS = 30.0

WEBHOOK_PATH = "/alerts"


class AlertmanagerUnavailableError(Exception):
    """No Alertmanager here; the message says why in one line."""


def find_alertmanager() -> Path:
    """The installed one, by Debian's name or its own."""
    found = shutil.which("prometheus-alertmanager") or shutil.which("alertmanager")
    if found is None:
        raise AlertmanagerUnavailableError(
            "no Alertmanager on the PATH; tests/system_packages.sh installs Debian's"
        )
    return Path(found)


@dataclass(frozen=True, slots=True, kw_only=True)
class Notice:
    """One alert of one notification.

    Attributes:
        arrived_at: at the webhook, in unix seconds.
        starts_at: the evaluation that made it fire, in unix seconds by Prometheus's clock.
    """

    arrived_at: float
    status: Literal["firing", "resolved"]
    labels: dict[str, str]
    annotations: dict[str, str]
    starts_at: float

    @property
    def name(self) -> str:
        return self.labels["alertname"]


def read_notification(body: bytes, arrived_at: float) -> list[Notice]:
    """The alerts of one body that Alertmanager posts to a webhook."""
    alerts: list[dict[str, Any]] = json.loads(body)["alerts"]
    return [
        Notice(
            arrived_at=arrived_at,
            status=alert["status"],
            labels=alert["labels"],
            annotations=alert["annotations"],
            starts_at=datetime.fromisoformat(alert["startsAt"]).timestamp(),
        )
        for alert in alerts
    ]


@contextlib.contextmanager
def webhook() -> Iterator[tuple[str, list[Notice]]]:
    """Gives the URL to notify, and what has arrived there so far, in the order of arrival."""
    notices: list[Notice] = []

    def take(request: BaseHTTPRequestHandler) -> None:
        body = request.rfile.read(int(request.headers["Content-Length"]))
        notices.extend(read_notification(body, time.time()))
        text_answer("")(request)

    with http_server({WEBHOOK_PATH: take}) as (url, _):
        yield url + WEBHOOK_PATH, notices


@contextlib.contextmanager
def alertmanager_server(program: Path, folder: Path, webhook_url: str) -> Iterator[str]:
    """Notifies the webhook of each alert by itself, as soon as it comes and goes; gives its host and port."""
    config = folder / "alertmanager.yml"
    route = {
        "receiver": "webhook",
        "group_by": ["..."],
        "group_wait": "0s",
        "group_interval": "1s",
        "repeat_interval": "1h",
    }
    receiver = {"name": "webhook", "webhook_configs": [{"url": webhook_url, "send_resolved": True}]}
    config.write_text(json.dumps({"route": route, "receivers": [receiver]}))  # JSON is YAML as well
    address = f"127.0.0.1:{free_loopback_port()}"
    process = ServerProcess(
        [
            program,
            f"--config.file={config}",
            f"--storage.path={folder / 'alertmanager'}",
            f"--web.listen-address={address}",
            "--cluster.listen-address=",  # alone: it would look for others on every network
        ],
        name="Alertmanager",
        log_path=folder / "alertmanager.log",
    )

    def is_ready() -> bool:
        try:
            return requests.get(f"http://{address}/-/ready", timeout=2).ok
        except requests.RequestException:
            return False

    try:
        process.wait_until(is_ready, limit_seconds=READY_LIMIT_SECONDS, every_seconds=0.05)
        yield address
    finally:
        process.stop(grace_seconds=10)
