"""A small loopback server for what a real vLLM cannot be made to do on demand: hang, lie, flood."""

import contextlib
import shutil
import socket
import socketserver
import ssl
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

Answer = Callable[[BaseHTTPRequestHandler], None]


def text_answer(body: bytes | str, *, status: int = 200, content_type: str = "text/plain") -> Answer:
    """Always the same answer."""
    content = body.encode() if isinstance(body, str) else body

    def answer(request: BaseHTTPRequestHandler) -> None:
        request.send_response(status)
        request.send_header("Content-Type", content_type)
        request.send_header("Content-Length", str(len(content)))
        request.end_headers()
        request.wfile.write(content)

    return answer


def hangs(_: BaseHTTPRequestHandler) -> None:
    """No answer for a while."""
    time.sleep(1.5)


def redirects(request: BaseHTTPRequestHandler) -> None:
    """To another host."""
    request.send_response(302)
    request.send_header("Location", "http://elsewhere.example/another")
    request.send_header("Content-Length", "0")
    request.end_headers()


def ranged(content: bytes, *, takes_ranges: bool = True) -> Answer:
    """A file as a hub serves it: with ranges from its beginning, or whole whatever was asked."""

    def answer(request: BaseHTTPRequestHandler) -> None:
        asked = request.headers["Range"] if takes_ranges else None
        part = content if asked is None else content[: int(asked.removeprefix("bytes=0-")) + 1]
        request.send_response(200 if asked is None else 206)
        request.send_header("Content-Length", str(len(part)))
        if asked is not None:
            request.send_header("Content-Range", f"bytes 0-{len(part) - 1}/{len(content)}")
        request.end_headers()
        request.wfile.write(part)

    return answer


def guarded(answers: dict[str, Answer], *, header: str, value: str, paths: str = "/") -> dict[str, Answer]:
    """The same, with 401 for who does not send the header; only at paths that begin so."""

    def guard(answer: Answer) -> Answer:
        def checked(request: BaseHTTPRequestHandler) -> None:
            known = request.headers.get_all(header) == [value]
            (answer if known else text_answer("who?", status=401))(request)

        return checked

    return {path: guard(answer) if path.startswith(paths) else answer for path, answer in answers.items()}


def make_certificate(folder: Path, *, name: str = "IP:127.0.0.1") -> Path:
    """A certificate that no system trusts, and its key, in one file."""
    openssl = shutil.which("openssl")
    if openssl is None:
        from tests.conftest import unavailable

        unavailable("a certificate of our own needs openssl")
    file = folder / "certificate.pem"
    subprocess.run(
        [
            openssl,
            "req",
            "-x509",
            "-newkey",
            "ec",
            "-pkeyopt",
            "ec_paramgen_curve:P-256",
            "-nodes",
            "-days",
            "2",
            "-subj",
            "/CN=vllm",
            "-addext",
            f"subjectAltName={name}",
            "-keyout",
            str(file),
            "-out",
            str(folder / "c"),
        ],
        check=True,
        capture_output=True,
    )
    file.write_text(file.read_text() + (folder / "c").read_text())
    return file


@contextlib.contextmanager
def http_server(
    answers: dict[str, Answer],
    *,
    certificate: Path | None = None,
    clients: Path | None = None,
    unix_socket: Path | None = None,
    port: int = 0,
) -> Iterator[tuple[str, list[tuple[str, dict[str, str]]]]]:
    """Serve `answers` by path; gives the base URL and the list of (path, headers) that came in.

    Args:
        certificate: of the server, which speaks TLS then.
        clients: a certificate that clients must show.
        unix_socket: listen there; the URL is of no use then.
        port: 0 for any.
    """
    seen: list[tuple[str, dict[str, str]]] = []

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            seen.append((self.path, dict(self.headers)))
            answer = answers.get(self.path, text_answer("not found", status=404))
            with contextlib.suppress(BrokenPipeError, ConnectionResetError):
                answer(self)

        def do_POST(self) -> None:
            self.do_GET()

        def log_message(self, *_: object) -> None:
            pass

    class Server(ThreadingHTTPServer):
        daemon_threads = True
        # Of a fleet that connects at once, nobody is to wait for a second try.
        request_queue_size = 128
        address_family = socket.AF_INET if unix_socket is None else socket.AF_UNIX

        def server_bind(self) -> None:
            # Not HTTPServer's, which looks for the host of a socket's path.
            socketserver.TCPServer.server_bind(self)

        def handle_error(self, *_: object) -> None:
            """A client that hangs up is what these tests are about."""

    # What TCPServer hands to bind(); its stubs know no other family.
    server = Server(("127.0.0.1", port) if unix_socket is None else str(unix_socket), Handler)  # type: ignore[arg-type]
    if certificate is not None:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(certificate)
        if clients is not None:
            context.load_verify_locations(clients)
            context.verify_mode = ssl.CERT_REQUIRED
        server.socket = context.wrap_socket(server.socket, server_side=True)
    thread = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
    thread.start()
    try:
        port = 0 if unix_socket is not None else server.server_address[1]
        yield f"{'http' if certificate is None else 'https'}://127.0.0.1:{port}", seen
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
