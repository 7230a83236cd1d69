"""examples/serve.py on loopback: answers are those of the model alone, whoever hangs up, is refused or fails beside."""

import asyncio
import json
import runpy
from pathlib import Path

import pytest
import torch

pytest.importorskip("starlette", reason="needs starlette")
pytest.importorskip("uvicorn", reason="needs uvicorn")

NAMES = runpy.run_path(str(Path(__file__).parents[2] / "examples" / "serve.py"))
LIMIT = 8


def model():
    torch.manual_seed(0)
    return NAMES["Model"](32, 2, 2).double()


def loaded(requests=40, clients=8, of=None, **sizes):
    """An engine after a load test, and what its clients saw."""
    engine = NAMES["Engine"](of or model(), **dict(slots=16, longest=600) | sizes)

    async def run():
        seen, _ = await asyncio.wait_for(NAMES["load"](engine, requests, clients, LIMIT), 60)
        return seen

    seen = asyncio.run(run())
    assert len(engine.pool.free) + len(engine.prefixes) == engine.slots and not engine.running
    assert sum(seen.statuses.values()) == requests
    whole = model()
    for prompt, text in seen.texts.items():
        assert text == NAMES["alone"](whole, prompt, LIMIT), prompt
    return engine, seen


def test_answers_are_those_of_the_model_alone_though_some_hang_up_and_some_are_too_long():
    engine, seen = loaded()
    assert seen.statuses == {200: 38, 413: 2} and len(seen.texts) >= 34
    assert engine.counts["hits"] > 2 and engine.counts["cancelled"] > 0 and not engine.counts["failed"]
    assert all("at most 600 tokens together" in error for error in seen.errors)


def test_who_finds_all_slots_and_the_queue_taken_is_told_so():
    _, seen = loaded(slots=1, queue=1)
    assert seen.statuses[503] > 0 and len(seen.texts) > 0
    assert any("Requests that run: 1, that wait: 1. Try again later." in error for error in seen.errors)


class SmallMemory(torch.nn.Module):
    """Runs out of memory at more tokens than it has room for, and always at one of the bytes in a prompt."""

    def __init__(self, room, poison=-1):
        super().__init__()
        self.of, self.room, self.poison = model(), room, poison
        self.embed, self.blocks = self.of.embed, self.of.blocks

    def forward(self, tokens, cache, cu_seqlens=None):
        if tokens.numel() > self.room or (tokens.shape[1] > 1 and (tokens == self.poison).any()):
            raise torch.OutOfMemoryError(f"{tokens.numel()} tokens.")
        return self.of(tokens, cache, cu_seqlens)


def test_steps_that_memory_is_too_small_for_are_made_in_parts():
    engine, seen = loaded(of=SmallMemory(64))
    assert engine.counts["halved"] > 0 and not engine.counts["failed"] and len(seen.texts) >= 34


def test_a_request_that_no_memory_is_large_enough_for_fails_alone():
    engine, seen = loaded(of=SmallMemory(512, poison=ord("3")))
    failed = [prompt for prompt in seen.failed if len(prompt) < 600]
    assert engine.counts["failed"] == len(failed) > 5 and all("3" in prompt for prompt in failed)
    assert any("of this request alone failed: " in error for error in seen.errors)
    assert len(seen.texts) > 10 and not any("3" in prompt for prompt in seen.texts)


def test_a_call_that_is_no_request_is_told_what_to_send():
    from starlette.testclient import TestClient

    engine = NAMES["Engine"](model(), slots=2)
    with TestClient(NAMES["application"](engine)) as client:
        for body in ("no json", json.dumps({"max_tokens": 3}), json.dumps({"prompt": "a", "max_tokens": "many"})):
            answer = client.post("/generate", content=body)
            assert answer.status_code == 400 and "send" in answer.json()["error"]
        assert client.post("/generate", json={"prompt": ""}).status_code == 400
        lines = client.post("/generate", json={"prompt": "ab", "max_tokens": 2}).text.splitlines()
        assert json.loads(lines[-1]) == {"done": 2, "cached": 0} and len(lines) == 3
        assert client.get("/health").json()["finished"] == 1
