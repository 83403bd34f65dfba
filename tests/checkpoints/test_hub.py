"""A local server speaks the part of the hub's HTTP interface that a download needs; nothing leaves the machine."""

from __future__ import annotations

import errno
import hashlib
import http.server
import json
import threading
from pathlib import Path

import huggingface_hub
import pytest
from huggingface_hub import constants

from paceline.checkpoints import hub
from paceline.checkpoints.local import open_directory
from paceline.checkpoints.resolve import open_checkpoint
from paceline.errors import CheckpointError
from tiny_checkpoints import make_tiny
from tiny_gguf import write_gguf

COMMIT = "0123456789abcdef0123456789abcdef01234567"
REPOSITORY = "owner/tiny"


class Hub:
    """What the server serves, what it was asked for, and how it misbehaves."""

    def __init__(self, root: Path):
        self.root = root
        self.requested: list[str] = []
        self.cut_after_bytes: dict[str, int] = {}  # file name -> bytes sent before the connection breaks, once
        self.refuse_with: tuple[int, str] | None = None  # HTTP status, X-Error-Code

    def files(self) -> list[str]:
        return sorted(str(path.relative_to(self.root)) for path in self.root.rglob("*") if path.is_file())

    def tree(self) -> list[dict]:
        sizes = {name: (self.root / name).stat().st_size for name in self.files()}
        return [
            {"type": "file", "path": name, "size": size, "oid": self.etag(name)[:40]} for name, size in sizes.items()
        ]

    def etag(self, name: str) -> str:
        return hashlib.sha256((self.root / name).read_bytes()).hexdigest()


class Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    hub: Hub

    def do_HEAD(self):
        self.respond()

    def do_GET(self):
        self.respond()

    def respond(self):
        path = self.path.split("?")[0]
        self.hub.requested.append(f"{self.command} {path}")
        if self.hub.refuse_with is not None:
            status, code = self.hub.refuse_with
            self.reply(status, b"{}", {"X-Error-Code": code} if code else {})
        elif path in (f"/api/models/{REPOSITORY}", f"/api/models/{REPOSITORY}/revision/main",
                      f"/api/models/{REPOSITORY}/revision/{COMMIT}"):  # fmt: skip
            siblings = [{"rfilename": name} for name in self.hub.files()]
            self.reply(200, json.dumps({"id": REPOSITORY, "sha": COMMIT, "siblings": siblings, "tags": []}).encode())
        elif path.startswith(f"/api/models/{REPOSITORY}/revision/"):
            self.reply(404, b"{}", {"X-Error-Code": "RevisionNotFound"})
        elif path == f"/api/models/{REPOSITORY}/tree/{COMMIT}":
            self.reply(200, json.dumps(self.hub.tree()).encode())
        elif path.startswith(f"/{REPOSITORY}/resolve/{COMMIT}/"):
            self.send_file(path.removeprefix(f"/{REPOSITORY}/resolve/{COMMIT}/"))
        else:
            self.reply(404, b"{}", {"X-Error-Code": "RepoNotFound"})

    def send_file(self, name: str):
        content = (self.hub.root / name).read_bytes()
        headers = {"ETag": f'"{self.hub.etag(name)}"', "X-Repo-Commit": COMMIT, "Accept-Ranges": "bytes"}
        status, first = 200, 0
        if wanted := self.headers.get("Range"):
            first = int(wanted.removeprefix("bytes=").split("-")[0])
            headers["Content-Range"] = f"bytes {first}-{len(content) - 1}/{len(content)}"
            status = 206
            self.hub.requested.append(f"RANGE {name} {first}")
        cut = self.hub.cut_after_bytes.pop(name, None) if self.command == "GET" else None
        self.reply(status, content[first:], headers, cut)

    def reply(self, status: int, body: bytes, headers: dict[str, str] | None = None, cut: int | None = None):
        self.send_response(status)
        for key, value in (headers or {}).items():
            self.send_header(key, value)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body[:cut])
        if cut is not None:
            self.wfile.flush()
            self.close_connection = True

    def log_message(self, *_):
        pass


@pytest.fixture
def served(tmp_path, monkeypatch):
    """A hub with one repository, and an empty cache."""
    root = tmp_path / "served"
    make_tiny("llama", root, max_shard_size="40KB")
    (root / "README.md").write_text("read me")
    (root / "pytorch_model.bin").write_bytes(b"pickle")
    (root / "modeling.py").write_text("raise SystemExit")
    (root / "original").mkdir()
    (root / "original" / "params.json").write_text("{}")
    Handler.hub = Hub(root)
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
    _serve_from(monkeypatch, f"http://127.0.0.1:{server.server_port}")
    monkeypatch.setattr("huggingface_hub.utils._http.time.sleep", lambda seconds: None)  # between retries
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
    yield Handler.hub
    server.shutdown()
    server.server_close()


def _serve_from(monkeypatch, endpoint):
    monkeypatch.setattr(constants, "ENDPOINT", endpoint)
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", endpoint + "/{repo_id}/resolve/{revision}/{filename}")


def _unplug(monkeypatch):
    _serve_from(monkeypatch, "http://127.0.0.1:9")


def _go_offline(monkeypatch):
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)


def test_a_hub_id_opens_pinned_to_its_commit(served):
    checkpoint = open_checkpoint(REPOSITORY)
    assert checkpoint.source == f"{REPOSITORY}@{COMMIT}"
    assert checkpoint.digest == open_directory(served.root).digest


def test_only_what_is_needed_is_fetched(served, tmp_path):
    open_checkpoint(REPOSITORY)
    fetched = {path.name for path in (tmp_path / "cache").rglob(f"snapshots/{COMMIT}/*")}
    assert "config.json" in fetched and any(name.endswith(".safetensors") for name in fetched)
    assert not fetched & {"README.md", "pytorch_model.bin", "modeling.py", "original", "params.json"}


def test_progress_ends_at_all_bytes(served):
    calls = []
    open_checkpoint(REPOSITORY, progress=lambda done, total: calls.append((done, total)))
    needed = hub.select_files(REPOSITORY, served.files())
    assert calls[-1] == (sum((served.root / name).stat().st_size for name in needed),) * 2
    assert [done for done, _ in calls] == sorted(done for done, _ in calls)


def test_a_second_opening_downloads_nothing(served):
    open_checkpoint(REPOSITORY)
    served.requested.clear()
    open_checkpoint(REPOSITORY)
    assert not [request for request in served.requested if request.startswith("GET /owner")]


def test_offline_uses_the_cache(served, monkeypatch):
    online = open_checkpoint(REPOSITORY)
    served.requested.clear()
    _go_offline(monkeypatch)
    assert open_checkpoint(REPOSITORY).source == online.source
    assert open_checkpoint(REPOSITORY, revision=COMMIT).source == online.source
    assert served.requested == []


def test_an_unreachable_hub_uses_the_cache(served, monkeypatch):
    online = open_checkpoint(REPOSITORY)
    _unplug(monkeypatch)
    assert open_checkpoint(REPOSITORY).source == online.source


def test_a_failing_hub_uses_the_cache(served):
    online = open_checkpoint(REPOSITORY)
    served.refuse_with = (503, "")
    assert open_checkpoint(REPOSITORY).source == online.source


@pytest.mark.parametrize("break_it", [_go_offline, _unplug])
def test_offline_without_a_cached_copy_says_so(served, monkeypatch, break_it):
    break_it(monkeypatch)
    with pytest.raises(CheckpointError, match=r"`owner/tiny` is not in the cache .* cannot be reached") as caught:
        open_checkpoint(REPOSITORY)
    assert "HF_HUB_OFFLINE" in caught.value.hint


def test_an_interrupted_download_continues_where_it_stopped(served, monkeypatch):
    shard = next(name for name in served.files() if name.endswith(".safetensors"))
    served.cut_after_bytes = {shard: 1000}
    monkeypatch.setattr(constants, "DOWNLOAD_CHUNK_SIZE", 500)
    checkpoint = open_checkpoint(REPOSITORY)
    assert f"RANGE {shard} 1000" in served.requested
    assert checkpoint.digest == open_directory(served.root).digest


def test_a_download_that_failed_can_be_continued(served, monkeypatch):
    def fail(*_, **__):
        raise ConnectionError("cable pulled")

    with monkeypatch.context() as patch:
        patch.setattr("huggingface_hub._snapshot_download.hf_hub_download", fail)
        with pytest.raises(CheckpointError, match=r"stopped \(ConnectionError: cable pulled\)") as caught:
            open_checkpoint(REPOSITORY)
    assert "continues where it stopped" in caught.value.hint
    assert open_checkpoint(REPOSITORY).digest == open_directory(served.root).digest


def test_an_incomplete_cache_offline_names_what_is_missing(served, tmp_path, monkeypatch):
    open_checkpoint(REPOSITORY)
    shard = sorted((tmp_path / "cache").rglob("snapshots/*/*.safetensors"))[0]
    shard.unlink()
    _go_offline(monkeypatch)
    with pytest.raises(CheckpointError, match=f"lacks 1 of .*`{shard.name}`"):
        open_checkpoint(REPOSITORY)


@pytest.mark.parametrize(
    ("refusal", "message", "hint"),
    [
        ((403, "GatedRepo"), "is gated", "HF_TOKEN"),
        ((404, "RepoNotFound"), "is not on the hub, or is private", "HF_TOKEN"),
        ((404, "RevisionNotFound"), "has no branch, tag or commit", "commits"),
        ((503, ""), "is not in the cache", "network"),
    ],
)
def test_refusals_say_what_to_do(served, refusal, message, hint):
    served.refuse_with = refusal
    with pytest.raises(CheckpointError, match=message) as caught:
        open_checkpoint(REPOSITORY, revision="main")
    assert hint in caught.value.hint


def test_an_unknown_revision_is_named(served):
    with pytest.raises(CheckpointError, match="`revision`: `owner/tiny` has no branch, tag or commit 'v9'"):
        open_checkpoint(REPOSITORY, revision="v9")


def test_a_full_disk_is_recognised(served, monkeypatch):
    def fail(*_, **__):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fail)
    with pytest.raises(CheckpointError, match="disk is full") as caught:
        open_checkpoint(REPOSITORY)
    assert "HF_HOME" in caught.value.hint


def test_a_repository_of_one_gguf_opens(served, tmp_path):
    model = make_tiny("llama", tmp_path / "other")
    for path in list(served.root.iterdir()):
        if path.is_file():
            path.unlink()
    write_gguf(model, served.root / "tiny-q8_0.gguf")
    (served.root / "config.json").write_text("{}")  # many such repositories carry one; it says nothing of the file
    checkpoint = open_checkpoint(REPOSITORY)
    assert checkpoint.source == f"{REPOSITORY}@{COMMIT}" and checkpoint.architecture.family == "llama"


@pytest.mark.parametrize(
    ("names", "selected"),
    [
        (["config.json", "model.safetensors", "consolidated.safetensors"], ["config.json", "model.safetensors"]),
        (["config.json", "m-Q4_K_M.gguf", "m-Q8_0.gguf", "m-Q2_K.gguf"], ["m-Q8_0.gguf"]),
        (["m-Q2_K.gguf"], ["m-Q2_K.gguf"]),
        (["model.safetensors", "m-Q8_0.gguf"], ["model.safetensors"]),
    ],
)
def test_selection(names, selected):
    assert hub.select_files(REPOSITORY, names) == selected


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (["config.json", "pytorch_model.bin"], "only pickled weights"),
        (["README.md"], "no weights"),
        (["a-Q2_K.gguf", "a-Q3_K_S.gguf"], "2 GGUF files and none of the usual kinds"),
        (["original/model.safetensors"], "no weights"),
    ],
)
def test_a_repository_without_usable_weights_is_refused_before_downloading(names, message):
    with pytest.raises(CheckpointError, match=message):
        hub.select_files(REPOSITORY, names)
