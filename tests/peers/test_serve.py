"""examples/serve.py on loopback: answers are those of the model alone, whoever hangs up, is refused or fails beside."""

import asyncio
import json
import re
import runpy
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("starlette", reason="needs starlette")
pytest.importorskip("uvicorn", reason="needs uvicorn")

pytestmark = pytest.mark.peers

PROGRAM = Path(__file__).parents[2] / "examples" / "serve.py"
NAMES = runpy.run_path(str(PROGRAM))
LIMIT = 8
PATIENCE = 600                               # seconds to wait for what must come


def model():
    torch.manual_seed(0)
    return NAMES["Model"](32, 2, 2).double()


def loaded(requests=40, clients=8, model_served=None, model_compared=None, **sizes):
    """An engine after a load test, and what its clients saw."""
    engine = NAMES["Engine"](model_served or model(), **dict(slots=16, longest=600) | sizes)

    async def run():
        seen, _ = await asyncio.wait_for(NAMES["load"](engine, requests, clients, LIMIT), PATIENCE)
        return seen

    seen = asyncio.run(run())
    assert len(engine.pool.free) + len(engine.prefixes) == engine.slots and not engine.running
    assert sum(seen.statuses.values()) == requests
    whole = model_compared or model()
    for prompt, text in seen.texts.items():
        assert text == NAMES["alone"](whole, prompt, LIMIT), prompt
    return engine, seen


def test_answers_are_those_of_the_model_alone_though_some_hang_up_and_some_are_too_long():
    engine, seen = loaded()
    assert seen.statuses == {200: 38, 413: 2} and len(seen.texts) >= 34
    assert engine.counts["hits"] > 2 and engine.counts["cancelled"] > 0 and not engine.counts["failed"]
    assert all("at most 600 tokens together" in error for error in seen.errors)


def test_a_model_with_a_layer_of_attention_is_served_from_keys_in_slots_as_it_answers_alone():
    torch.manual_seed(1)
    whole = NAMES["Model"](32, 2, 4).double()
    assert isinstance(whole.blocks[3].mixes, NAMES["Attention"])
    torch.nn.init.normal_(whole.blocks[3].mixes.out.weight)                    # so that answers depend on it
    engine, seen = loaded(model_served=whole, model_compared=whole)
    assert len(seen.texts) >= 34 and engine.counts["hits"] > 2


def test_keys_that_stay_behind_in_another_slot_are_noticed(monkeypatch):
    torch.manual_seed(1)
    whole = NAMES["Model"](32, 2, 4).double()
    torch.nn.init.normal_(whole.blocks[3].mixes.out.weight)
    monkeypatch.setattr(NAMES["Pool"], "copy", lambda pool, source, to, tokens: pool.write([to], pool.read([source])))
    with pytest.raises(AssertionError):
        loaded(model_served=whole, model_compared=whole)


def test_what_train_writes_and_convert_writes_in_another_layout_is_served(tmp_path):
    torch.manual_seed(0)
    whole = NAMES["Model"](32, 2, 4)
    whole.write(tmp_path)
    convert = [sys.executable, PROGRAM.with_name("convert.py"), tmp_path, "--to", "fla", "--out", tmp_path / "fla"]
    subprocess.run(convert, check=True, capture_output=True)
    answers = {NAMES["alone"](each, "The state", LIMIT) for each in (
        whole, NAMES["Model"].read(tmp_path), NAMES["Model"].read(tmp_path / "fla"))}
    assert len(answers) == 1 and len(*answers) > 0
    command = [sys.executable, PROGRAM, "--device", "cpu", "--model", tmp_path / "fla", "--load", 5, "--check",
               "--dtype", "float64"]
    ran = subprocess.run([*map(str, command)], capture_output=True, text=True)
    assert ran.returncode == 0 and "4 of 4 prompts have the answers of the model alone" in ran.stdout, ran.stderr


def test_who_finds_all_slots_and_the_queue_taken_is_told_so():
    _, seen = loaded(slots=1, queue=1)
    assert seen.statuses[503] > 0 and len(seen.texts) > 0
    assert any("Requests that run: 1, that wait: 1. Try again later." in error for error in seen.errors)


def test_a_free_slot_counts_before_a_step_gives_it_to_who_waits():
    async def run():
        engine = NAMES["Engine"](model(), slots=3, longest=600, queue=1)
        for _ in range(4):
            engine.submit(b"a", 1)
        with pytest.raises(NAMES["Refused"], match=r"room for 4 requests\. Requests that run: 0, that wait: 4\."):
            engine.submit(b"a", 1)

    asyncio.run(run())


class SmallMemory(torch.nn.Module):
    """Runs out of memory at more tokens than it has room for, and always at one of the bytes in a prompt."""

    def __init__(self, room, poison=-1):
        super().__init__()
        self.model, self.room, self.poison = model(), room, poison
        self.embed, self.blocks = self.model.embed, self.model.blocks

    def forward(self, tokens, cache, cu_seqlens=None, keys=None):
        if tokens.numel() > self.room or (tokens.shape[1] > 1 and (tokens == self.poison).any()):
            raise torch.OutOfMemoryError(f"{tokens.numel()} tokens.")
        return self.model(tokens, cache, cu_seqlens, keys)


def test_steps_that_memory_is_too_small_for_are_made_in_parts():
    engine, seen = loaded(model_served=SmallMemory(64))
    assert engine.counts["halved"] > 0 and not engine.counts["failed"] and len(seen.texts) >= 34


def test_a_request_that_no_memory_is_large_enough_for_fails_alone():
    engine, seen = loaded(model_served=SmallMemory(512, poison=ord("3")))
    failed = [prompt for prompt in seen.failed if len(prompt) < 600]
    assert engine.counts["failed"] == len(failed) > 5 and all("3" in prompt for prompt in failed)
    assert any("of this request alone failed: " in error for error in seen.errors)
    assert len(seen.texts) > 10 and not any("3" in prompt for prompt in seen.texts)


def test_a_request_whose_numbers_are_not_finite_fails_and_the_others_have_their_answers():
    broken = model()
    broken.embed.weight.data[ord("3")] = float("nan")
    engine, seen = loaded(model_served=broken)
    failed = [prompt for prompt in seen.failed if len(prompt) < 600]
    assert engine.counts["failed"] == len(failed) > 5 and all("3" in prompt for prompt in failed)
    assert any("the model's numbers are not finite: nan or infinity. Others go on." in error for error in seen.errors)
    assert len(seen.texts) > 10 and not any("3" in prompt for prompt in seen.texts)


def test_a_call_that_is_no_request_is_told_what_to_send():
    from starlette.testclient import TestClient

    engine = NAMES["Engine"](model(), slots=2)
    with TestClient(NAMES["application"](engine)) as client:
        for body in ("no json", json.dumps({"max_tokens": 3}), json.dumps({"prompt": "a", "max_tokens": "many"})):
            answer = client.post("/generate", content=body)
            assert answer.status_code == 400 and "Send" in answer.json()["error"]
        assert client.post("/generate", json={"prompt": ""}).status_code == 400
        assert engine.counts["refused"] == 4
        lines = client.post("/generate", json={"prompt": "ab", "max_tokens": 2}).text.splitlines()
        assert json.loads(lines[-1]) == {"done": 2, "cached": 0} and len(lines) == 3
        assert client.get("/health").json()["finished"] == 1


@pytest.mark.parametrize(("body", "says"), [
    ('{"prompt": "a", "max_tokens": Infinity}', "max_tokens must be a whole number; found Infinity."),
    ('{"prompt": "a", "max_tokens": 1e400}', "max_tokens must be a whole number; found Infinity."),
    ('{"prompt": "a", "max_tokens": NaN}', "max_tokens must be a whole number; found NaN."),
    ('{"prompt": "a", "max_tokens": true}', "max_tokens must be a whole number; found true."),
    ('{"prompt": "a", "max_tokens": null}', "max_tokens must be a whole number; found null."),
    ('{"prompt": "a", "max_tokens": %s}' % ("9" * 4000), "must be a whole number from 1 to 4096; found 999"),
    ('{"prompt": "a", "max_tokens": %s}' % ("9" * 9000), "The body has a number with too many digits."),
    ('{"prompt": "a", "max_tokens": -1}', "max_tokens must be a whole number from 1 to 4096; found -1."),
    ('{"prompt": "a", "more": %s}' % ("[" * 9000), "The body has lists or objects that are nested too deeply."),
    ("[" * 28000, "The body has lists or objects that are nested too deeply."),
    ('{"prompt": ["a"]}', 'prompt must be a text; found ["a"].'),
    ('{"max_tokens": 3}', 'The body must have a prompt; found "max_tokens".'),
    ("{}", "The body must have a prompt; found no field."),
    ('{"prompt": "a", "max_token": 3}', 'The body must have prompt and max_tokens alone; found "max_token".'),
    ('"prompt"', 'The body must be an object; found "prompt".'),
    ('{"prompt": "\\ud800"}', "prompt has half of a surrogate pair after 0 characters, which is no text."),
    (b"\xff\xfe\xff", "The body must be UTF-8; found other bytes after 0 bytes."),
    ("", "The body must be JSON; found an error at line 1, column 1: Expecting value."),
    ("{'prompt': 'a'}", "The body must be JSON; found an error at line 1, column 2: "),
], ids=range(19))
def test_a_body_that_asks_for_nothing_possible_gets_status_400_and_sentences(body, says):
    from starlette.testclient import TestClient

    with TestClient(NAMES["application"](NAMES["Engine"](model(), slots=2))) as client:
        answer = client.post("/generate", content=body)
        error = answer.json()["error"]
        assert answer.status_code == 400 and says in error and len(error) < 300
        assert re.fullmatch(r".*\. Send .*\.", error) and "'" not in error and "Error" not in error


def with_server(engine, client):
    """Runs a server and a client, which receives the server and its port."""

    async def both():
        with socket.socket() as listening:
            listening.bind(("127.0.0.1", 0))
            listening.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
            server = NAMES["server_of"](engine, 0, log_config=None)
            serving = asyncio.create_task(server.serve([listening]))
            while not server.started:
                await asyncio.sleep(0.01)
            await client(server, listening.getsockname()[1])
            server.should_exit = True
            await serving

    asyncio.run(asyncio.wait_for(both(), PATIENCE))


POST = b"POST /generate HTTP/1.1\r\nHost: loopback\r\n"


async def answer_of(reader):
    """Status and JSON of an answer with a length."""
    head = await reader.readuntil(b"\r\n\r\n")
    length = int(re.search(rb"content-length: (\d+)", head)[1])
    return int(head.split()[1]), json.loads(await reader.readexactly(length))


def test_a_body_that_is_too_large_is_refused_before_it_is_complete():
    engine, limit = NAMES["Engine"](model(), slots=2, longest=100), "The body must be at most 4696 bytes; found "

    async def client(server, port):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(POST + b"Content-Length: 300000000\r\n\r\n")             # and nothing of it
        status, said = await answer_of(reader)
        assert (status, said["error"]) == (413, limit + "300000000. Send a shorter prompt.")
        writer.close()
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(POST + b"Transfer-Encoding: chunked\r\n\r\n" + b"800\r\n" + b"x" * 0x800 + b"\r\n")
        writer.write(b"a59\r\n" + b"x" * 0xA59 + b"\r\n")                      # 4,697 bytes, and no end
        status, said = await answer_of(reader)
        assert (status, said["error"]) == (413, limit + "more. Send a shorter prompt.")
        writer.write(b"100000\r\n" + b"x" * 0x100000 + b"\r\n0\r\n\r\n")         # the rest is not kept
        body = json.dumps({"prompt": ""}).encode().ljust(4696)
        writer.write(POST + b"Content-Length: 4696\r\n\r\n" + body)            # the largest, on the same connection
        status, said = await answer_of(reader)
        assert status == 400 and said["error"].startswith("prompt must not be empty")
        writer.close()

    with_server(engine, client)


def test_a_client_that_leaves_in_its_body_or_its_stream_leaves_no_traceback(caplog):
    engine = NAMES["Engine"](model(), slots=2, longest=100_000)

    async def client(server, port):
        for sent in (b"Content-Length: 100\r\n\r\n{", b"Transfer-Encoding: chunked\r\n\r\n3\r\n{", b"Content-"):
            _, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(POST + sent)
            await writer.drain()
            writer.close()
        await NAMES["post"](port, {"prompt": "a", "max_tokens": 90_000}, lambda line: False)
        while engine.health()["cancelled"] < 1:
            await asyncio.sleep(0.01)

    with caplog.at_level("WARNING"):
        with_server(engine, client)
    assert not caplog.records and engine.health()["free"] == 2


def test_a_client_that_does_not_read_its_stream_does_not_hold_up_the_end_of_the_server(caplog):
    engine = NAMES["Engine"](model(), slots=2, longest=100_000)

    async def client(server, port):
        deaf = socket.create_connection(("127.0.0.1", port))
        body = json.dumps({"prompt": "a", "max_tokens": 90_000}).encode()
        deaf.sendall(POST + b"Content-Length: %d\r\n\r\n" % len(body) + body)
        while not engine.running:
            await asyncio.sleep(0.01)
        connection, = server.server_state.connections
        while not connection.flow.write_paused:
            engine.running[0].events.put_nowait(97)                            # as if a step had made a token
            await asyncio.sleep(0)
        clients.append(deaf)

    clients = []
    with caplog.at_level("WARNING"):
        with_server(engine, client)
    assert not caplog.records
    clients[0].close()


class Process:
    """The example in a process of its own, with a stream that does not end and a body that is half sent."""

    def __init__(self, grace):
        command = [sys.executable, PROGRAM, "--device", "cpu", "--hidden", "8", "--heads", "2", "--layers", "1",
                   "--port", "0", "--longest", "1000000000", "--grace", str(grace)]
        self.process = subprocess.Popen(command, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True)
        self.log = ""
        port = int(re.search(r"http://127.0.0.1:(\d+)", self.log_until("Uvicorn running"))[1])
        self.stream, self.half = (socket.create_connection(("127.0.0.1", port), PATIENCE) for _ in range(2))
        body = json.dumps({"prompt": "a", "max_tokens": 900_000_000}).encode()
        whole = POST + b"Content-Length: %d\r\n\r\n" % len(body) + body
        self.stream.sendall(whole)
        self.half.sendall(whole[:-1])
        assert self.stream.recv(15) == b"HTTP/1.1 200 OK"

    def log_until(self, words):
        for line in self.process.stderr:
            self.log += line
            if words in line:
                return line
        raise AssertionError(f"the server ended: {self.log}")

    def __enter__(self):
        return self

    def __exit__(self, *error):
        self.process.kill()
        for each in (self.stream, self.half, self.process.stderr):
            each.close()
        self.process.wait()


def everything(connection):
    return b"".join(iter(lambda: connection.recv(1 << 16), b""))


def test_a_signal_ends_streams_after_the_stated_time_and_half_sent_bodies_at_once():
    with Process(grace=1) as server:
        server.process.send_signal(signal.SIGINT)
        assert b"HTTP/1.1 503 " in (said := everything(server.half)) and b"The server is stopping." in said
        assert b'{"error": "The server is stopping. ' in everything(server.stream)
        assert server.process.wait(PATIENCE) == 0
        assert "Traceback" not in server.log + server.process.stderr.read()


def test_a_second_signal_ends_the_server_at_once():
    with Process(grace=1_000_000) as server:
        server.process.send_signal(signal.SIGTERM)
        server.log_until("Shutting down")
        assert b"HTTP/1.1 503 " in everything(server.half) and server.process.poll() is None
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(PATIENCE) == -signal.SIGTERM
