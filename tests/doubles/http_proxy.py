"""A small forward proxy on loopback: whole addresses for http, CONNECT for https, and a password if wanted."""

import contextlib
import http.client
import select
import socket
import ssl
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import urlsplit


@contextlib.contextmanager
def http_proxy(
    *, authorization: str | None = None, certificate: Path | None = None
) -> Iterator[tuple[str, list[str]]]:
    """Gives the proxy's URL and what it was asked for, as `GET http://...` or `CONNECT host:port`."""
    asked: list[str] = []

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def _lets_through(self) -> bool:
            asked.append(f"{self.command} {self.path}")
            if authorization is None or self.headers.get("Proxy-Authorization") == authorization:
                return True
            self.send_response(407)
            self.send_header("Content-Length", "0")
            self.end_headers()
            return False

        def do_GET(self) -> None:
            if not self._lets_through():
                return
            parts = urlsplit(self.path)
            server = http.client.HTTPConnection(parts.netloc, timeout=5)
            query = f"?{parts.query}" if parts.query else ""
            headers = {name: value for name, value in self.headers.items() if not name.startswith("Proxy-")}
            server.request("GET", parts.path + query, headers=headers)
            answer = server.getresponse()
            body = answer.read()
            server.close()
            self.send_response(answer.status)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def do_CONNECT(self) -> None:
            if not self._lets_through():
                return
            host, _, port = self.path.rpartition(":")
            with socket.create_connection((host, int(port)), timeout=5) as server:
                # As old proxies say it.
                self.wfile.write(b"HTTP/1.0 200 Connection established\r\n\r\n")
                self._pass_on(server)
            self.close_connection = True

        def _pass_on(self, server: socket.socket) -> None:
            other = {server: self.connection, self.connection: server}
            while True:
                # What TLS has read already, select() does not see.
                waiting = [one for one in other if isinstance(one, ssl.SSLSocket) and one.pending()]
                for ready in waiting or select.select(list(other), [], [], 5)[0]:
                    data = ready.recv(1 << 16)
                    if not data:
                        return
                    other[ready].sendall(data)

        def log_message(self, *_: object) -> None:
            pass

    class Server(ThreadingHTTPServer):
        daemon_threads = True

        def handle_error(self, *_: object) -> None:
            pass

    server = Server(("127.0.0.1", 0), Handler)
    if certificate is not None:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(certificate)
        server.socket = context.wrap_socket(server.socket, server_side=True)
    thread = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
    thread.start()
    try:
        yield f"{'http' if certificate is None else 'https'}://127.0.0.1:{server.server_address[1]}", asked
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
