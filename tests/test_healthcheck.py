"""The container's health check: where it asks, and what it makes of the answer."""

import threading
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest

from streamkv import healthcheck
from streamkv.healthcheck import health_url, server_flags

COMMAND = ["/opt/streamkv/bin/python3", "/opt/streamkv/bin/streamkv", "serve"]
MODULE = ["python", "-m", "streamkv.entrypoints.openai.api_server"]


@pytest.fixture
def processes(tmp_path, monkeypatch):
    """Gives the next process its command line."""

    def start(*words):
        folder = tmp_path / "proc" / str(len(list((tmp_path / "proc").iterdir())) + 9)
        folder.mkdir()
        (folder / "cmdline").write_bytes(b"".join(word.encode() + b"\0" for word in words))

    (tmp_path / "proc").mkdir()
    (tmp_path / "proc/self").mkdir()
    (tmp_path / "proc/8").mkdir()  # which has just ended
    monkeypatch.setattr(healthcheck, "PROCESSES", tmp_path / "proc")
    return start


@pytest.mark.parametrize(
    ("flags", "variables", "url"),
    [
        ([], {}, "http://127.0.0.1:8000/health"),
        ([], {"STREAMKV_HOST": "0.0.0.0"}, "http://127.0.0.1:8000/health"),
        (["--model", "m", "--port", "9000"], {}, "http://127.0.0.1:9000/health"),
        (["--port=9000", "m"], {"STREAMKV_PORT": "7000"}, "http://127.0.0.1:9000/health"),
        ([], {"STREAMKV_PORT": "7000"}, "http://127.0.0.1:7000/health"),
        (["--host", "::"], {}, "http://[::1]:8000/health"),
        (["--host", "10.1.2.3"], {}, "http://10.1.2.3:8000/health"),
    ],
)
def test_it_asks_where_the_server_listens(flags, variables, url, monkeypatch):
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert health_url(flags) == url


@pytest.mark.parametrize(
    "command",
    [
        COMMAND,
        MODULE,
        ["python", "-m", "streamkv", "serve"],
        ["/sbin/docker-init", "--", "streamkv", "serve"],
    ],
)
def test_the_flags_are_those_of_the_first_server(command, processes):
    assert server_flags() == []
    processes("sh", "-c", "streamkv serve --port 9000; echo over")
    processes(*command, "--port", "9000", "serve")
    processes(*COMMAND, "--port", "9001")
    assert server_flags() == ["--port", "9000", "serve"]


def test_the_file_of_the_server_counts(tmp_path):
    file = tmp_path / "streamkv.toml"
    file.write_text("port = 9100\n")
    assert health_url(["--config", str(file)]) == "http://127.0.0.1:9100/health"


@pytest.fixture
def server():
    class Handler(BaseHTTPRequestHandler):
        status = 200

        def do_GET(self):
            self.send_response(self.status if self.path == "/health" else 404)
            self.send_header("content-length", "0")
            self.end_headers()

        def log_message(self, *args):
            pass

    with HTTPServer(("127.0.0.1", 0), Handler) as served:
        thread = threading.Thread(target=served.serve_forever)
        thread.start()
        yield served
        served.shutdown()
        thread.join()


@pytest.mark.parametrize(("status", "exit_code"), [(200, 0), (503, 1)])
def test_only_a_server_that_is_ready_is_healthy(
    server, status, exit_code, processes, monkeypatch, capsys
):
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")  # nobody listens there
    monkeypatch.delenv("no_proxy", raising=False)
    server.RequestHandlerClass.status = status
    processes(*COMMAND, "--port", str(server.server_port))
    assert healthcheck.main() == exit_code
    assert ("503" in capsys.readouterr().err) is (status == 503)
    server.server_close()
    assert healthcheck.main() == 1


def test_a_wrong_flag_is_not_docker_s_exit_code(processes, capsys):
    processes(*COMMAND, "--prot", "9000")
    assert healthcheck.main() == 1  # 2 is reserved
    assert "--port" in capsys.readouterr().err
