"""Whatever a client sends, the server answers, and never with a 5xx: schemathesis over the published schema."""

from __future__ import annotations

import pytest
import schemathesis
from hypothesis import HealthCheck, given, settings
from servers import running

from paceline.runtime.drafting.suffix import SuffixDrafter

OPERATIONS = (
    "POST /v1/chat/completions", "POST /v1/completions", "POST /v1/responses", "POST /tokenize", "POST /detokenize",
    "GET /v1/models",
    "GET /v1/models/{name}", "GET /health", "GET /ready", "GET /metrics", "GET /stats",
)  # fmt: skip


@pytest.fixture(scope="module")
def server():
    with running(drafter=SuffixDrafter(1000, 2), max_seq_len=60) as started:
        yield started
        started.idle()


@pytest.fixture(scope="module")
def operations(server):
    schema = schemathesis.openapi.from_url(f"{server.url}/openapi.json")
    return {operation.ok().label: operation.ok() for operation in schema.get_all_operations()}


def test_every_operation_is_fuzzed(operations):
    assert set(operations) == set(OPERATIONS)


CASES = [(label, schemathesis.GenerationMode.POSITIVE) for label in OPERATIONS]
# Without parameters or a body there is nothing that could be wrong.
CASES += [(label, schemathesis.GenerationMode.NEGATIVE) for label in OPERATIONS if label.startswith("POST")]


@pytest.mark.parametrize("label, mode", CASES)
def test_never_a_server_error(server, operations, label, mode):
    @settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck), database=None)
    @given(case=operations[label].as_strategy(generation_mode=mode))
    def send(case):
        answer = case.call(base_url=server.url, timeout=30)
        assert answer.status_code < 500, answer.text
        assert server.worker.failure is None

    send()
