"""A small server of a language model of KDA layers, on a GPU if there is one.

    pip install starlette uvicorn
    python examples/train.py                          # writes runs/train
    python examples/serve.py --model runs/train       # http://127.0.0.1:8000
    python examples/serve.py --load 200 --clients 16  # a load test; it ends
    curl -N 127.0.0.1:8000/generate \\
        -d '{"prompt": "The state", "max_tokens": 20}'

It has continuous batching, streaming, a prefix cache and cancellation.  POST
/generate streams lines of JSON: {"text": ...} for each token, at last {"done":
..., "cached": tokens that a prefix brought}, or {"error": ...}.  GET /health
counts what there is.  --model is a folder that train.py wrote, or convert.py
from such a one; without it the weights are random, and the text is noise.

Every step packs pieces of prompts into one row, and gives each request that
decodes a row of one token.  A request has a slot of the pool of states from its
first token to its last; prompts are cut at multiples of 64 tokens, and the
states there are kept until their slots are needed.  A slot also has keys and
values of --longest tokens for each layer of attention.

  a request is too long    status 413, before it gets a slot; 400 if max_tokens
                           alone is
  a body is larger than 6  status 413, before the rest of the body is read
    bytes for each of
    --longest, and 4 KiB
  a request is not valid   status 400, and what to send
  all slots and the queue  status 503; running requests are not affected
    are taken
  the client disconnects   its slot is free before the next step
  memory runs out, or a    the batch is halved; where memory ran out, prefixes
    step fails             are given up; a request that fails alone ends with an
                           error; states are only written when a step has
                           succeeded, so others go on as if nothing had been
  SIGTERM or Ctrl-C        new requests, and those whose body is not complete,
                           are refused; streams have --grace seconds to end,
                           then they end with an error; a second signal ends
                           the server at once
"""

from __future__ import annotations

import argparse
import asyncio
import codecs
import contextlib
import json
import random
import signal
import socket
import sys
import time
from collections import deque
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from language_model import Attention, Kept, Model, attention

from kda.nn import Cache, KimiDeltaAttention
from kda.nn.cache import LayerState

CHUNK = 64                                   # prompts are cut at multiples of it
GRACE = 10                                   # seconds that streams have to end after a signal


class Pool:
    """The states of KDA layers, and keys and values of those of attention, in slots: what a step reads and writes."""

    def __init__(self, model: Model, slots: int, longest: int):
        self.layers: dict[int, LayerState] = {}
        self.keys: dict[int, Kept] = {}                                       # each (slots, longest, heads, dim)
        self.free, self.device = list(range(slots)), model.embed.weight.device
        like = model.embed.weight.detach()
        for layer in model.modules():
            if isinstance(layer, Attention):
                shape = slots, longest, layer.heads, like.shape[1] // layer.heads
                self.keys[layer.layer] = like.new_zeros(shape), like.new_zeros(shape)
            elif isinstance(layer, KimiDeltaAttention) and layer.layer_idx is not None:
                wide = torch.promote_types(like.dtype, torch.float32)
                recurrent = like.new_zeros(slots, layer.num_v_heads, layer.head_v_dim, layer.head_dim, dtype=wide)
                q, k, v = (like.new_zeros(slots, layer.conv_size - 1, each.channels)
                           for each in (layer.q_conv1d, layer.k_conv1d, layer.v_conv1d))
                self.layers[layer.layer_idx] = LayerState(recurrent, (q, k, v))

    def read(self, slots: list[int]) -> Cache:
        index = torch.tensor(slots, device=self.device)
        return Cache(self.layers).select(index)           # copies, which a step may update in place

    def write(self, slots: list[int], cache: Cache) -> None:
        index = torch.tensor(slots, device=self.device)
        for n, state in self.layers.items():
            for old, new in zip((state.recurrent, *state.conv), (cache[n].recurrent, *cache[n].conv)):
                old[index] = new.to(old.dtype)

    def copy(self, source: int, to: int, tokens: int) -> None:
        """Copy what a slot has after so many tokens."""
        self.write([to], self.read([source]))
        for both in self.keys.values():
            for x in both:
                x[to, :tokens] = x[source, :tokens]

    def clear(self, slot: int) -> None:
        for state in self.layers.values():
            for x in (state.recurrent, *state.conv):
                x[slot] = 0


class KeysInSlots:
    """Keys and values of the requests of a step, which lie in their slots, those of its own tokens included.

    No request reads behind the tokens that it has done, so a step that fails leaves nothing that is read.
    """

    def __init__(self, pool: Pool, rows: list[tuple[int, int, int]]):
        self.pool, self.rows = pool, rows                                     # slot, tokens before, tokens

    def attend(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        keys, values = self.pool.keys[layer]
        flat_q, flat_k, flat_v = (x.flatten(0, 1) for x in (q, k, v))
        parts, first = [], 0
        for slot, before, tokens in self.rows:
            row, end = slice(first, first + tokens), before + tokens
            keys[slot, before:end], values[slot, before:end] = flat_k[row], flat_v[row]
            parts.append(attention(flat_q[None, row], keys[None, slot, :end], values[None, slot, :end])[0])
            first += tokens
        return torch.cat(parts).view_as(q)


@dataclass(eq=False)
class Request:
    tokens: list[int]                        # the prompt's, then those that were made
    limit: int                               # tokens to make
    events: asyncio.Queue = field(default_factory=asyncio.Queue)     # tokens; None at the end; an Exception
    prompt: int = 0
    slot: int = -1
    done: int = 0                            # tokens behind its state
    cached: int = 0                          # how many of them a prefix brought
    cancelled: bool = False

    def __post_init__(self):
        self.prompt = len(self.tokens)

    @property
    def decodes(self) -> bool:
        return self.done >= self.prompt


class Refused(Exception):
    """A request that is not taken: a status and what to do."""

    def __init__(self, status: int, text: str):
        super().__init__(text)
        self.status = status


class Engine:
    """All but `_forward` runs in the event loop, so nothing changes while a step computes."""

    def __init__(self, model: Model, slots: int = 32, queue: int = 64, longest: int = 4096, batch: int = 512):
        self.model, self.pool, self.slots = model.eval(), Pool(model, slots, longest), slots
        self.queue, self.longest, self.batch = queue, longest, batch
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []
        self.prefixes: dict[tuple[int, ...], int] = {}                        # tokens -> slot, the oldest first
        counted = "finished", "cancelled", "failed", "refused", "hits", "halved", "steps"
        self.counts: dict[str, int] = dict.fromkeys(counted, 0)
        self.work, self.stopping = asyncio.Event(), asyncio.Event()

    # requests

    def submit(self, prompt: bytes, limit: int) -> Request:
        if not prompt:
            raise self.refuse(400, "prompt must not be empty. Send at least one character.")
        if not 1 <= limit <= self.longest:
            raise self.refuse(400, f"max_tokens must be a whole number from 1 to {self.longest}; found "
                                   f"{as_json(limit)}. Send one of those.")
        total = len(prompt) + limit
        if total > self.longest:
            raise self.refuse(413, f"prompt and max_tokens must be at most {self.longest} tokens together; found "
                                   f"{total}. Send a shorter prompt, or a smaller max_tokens.")
        if len(self.waiting) >= self.queue + max(self.slots - len(self.running), 0):     # free slots are for who waits
            raise self.refuse(503, f"Slots and queue have room for {self.slots + self.queue} requests. Requests that "
                                   f"run: {len(self.running)}, that wait: {len(self.waiting)}. Try again later.")
        request = Request(list(prompt), limit)
        self.waiting.append(request)
        self.work.set()
        return request

    def refuse(self, status: int, text: str) -> Refused:
        self.counts["refused"] += 1
        return Refused(status, text)

    def cancel(self, request: Request) -> None:
        request.cancelled = True
        self.work.set()

    def end(self) -> None:
        """End all requests, with an error for their clients."""
        for request in (*self.running, *self.waiting):
            request.events.put_nowait(RuntimeError("The server is stopping. Send the request again later."))
            self.cancel(request)

    # slots

    def _take(self) -> int | None:
        """A slot, if need be that of the oldest prefix."""
        if not self.pool.free and self.prefixes:
            self.pool.free.append(self.prefixes.pop(next(iter(self.prefixes))))
        return self.pool.free.pop() if self.pool.free else None

    def _admit(self) -> None:
        while self.waiting:
            if self.waiting[0].cancelled:
                self.waiting.popleft()
                self.counts["cancelled"] += 1
                continue
            prefix = self._prefix_of(self.waiting[0])
            held = self.prefixes.pop(prefix) if prefix else None              # so that nothing evicts it
            slot = self._take()
            if prefix and held is not None:
                self.prefixes[prefix] = held                                  # the youngest
            if slot is None:
                return
            request = self.waiting.popleft()
            request.slot = slot
            if prefix and held is not None:
                self.pool.copy(held, slot, len(prefix))
                request.done = request.cached = len(prefix)
                self.counts["hits"] += 1
            else:
                self.pool.clear(slot)
            self.running.append(request)

    def _prefix_of(self, request: Request) -> tuple[int, ...] | None:
        """The longest that is kept, and leaves a token to be computed."""
        last = (request.prompt - 1) // CHUNK * CHUNK
        keys = (tuple(request.tokens[:n]) for n in range(last, 0, -CHUNK))
        return next((key for key in keys if key in self.prefixes), None)

    def _keep_prefix(self, request: Request) -> None:
        key = tuple(request.tokens[: request.done])
        if request.done % CHUNK or request.done > request.prompt or key in self.prefixes or not self.pool.free:
            return
        self.prefixes[key] = slot = self.pool.free.pop()
        self.pool.copy(request.slot, slot, request.done)

    def _leave(self, request: Request, how: str, event: Any = None) -> None:
        self.running.remove(request)
        self.pool.free.append(request.slot)
        self.counts[how] += 1
        request.events.put_nowait(event)

    # steps

    async def run(self) -> None:
        while True:
            for request in [each for each in self.running if each.cancelled]:
                self._leave(request, "cancelled")
            self._admit()
            if not self.running:
                self.work.clear()
                if not self.waiting:
                    await self.work.wait()
                continue
            self.counts["steps"] += 1
            decoding = [request for request in self.running if request.decodes]
            pieces, room = [], self.batch
            for request in self.running:
                if not request.decodes and room >= CHUNK:
                    last = (request.prompt - 1) // CHUNK * CHUNK               # the state there is kept
                    whole = (request.done + room) // CHUNK * CHUNK
                    end = min(request.prompt if request.done >= last else last, whole)
                    pieces.append((request, end - request.done))
                    room -= end - request.done
            for batch in ([(request, 1) for request in decoding], pieces):
                await self._step(batch)

    async def _step(self, batch: list[tuple[Request, int]]) -> None:
        if not batch:
            return
        try:
            found, cache = await asyncio.to_thread(self._forward, batch)
        except Exception as error:                                             # whose fault it is shows in parts
            return await self._step_in_parts(batch, error)
        self.pool.write([request.slot for request, _ in batch], cache)
        for (request, n), token in zip(batch, found):
            request.done += n
            self._keep_prefix(request)
            if request.done >= request.prompt:
                request.tokens.append(token)
                request.events.put_nowait(token)
                if len(request.tokens) - request.prompt == request.limit:
                    self._leave(request, "finished")

    async def _step_in_parts(self, batch: list[tuple[Request, int]], error: Exception) -> None:
        if len(batch) > 1:
            self.counts["halved"] += 1
            await self._step(batch[: len(batch) // 2])
            await self._step(batch[len(batch) // 2 :])
        elif batch[0][1] > CHUNK:
            await self._step([(batch[0][0], CHUNK)])
        elif self.prefixes and isinstance(error, torch.OutOfMemoryError):
            self.pool.free += self.prefixes.values()
            self.prefixes.clear()
            await self._step(batch)
        else:
            text = f"a step of {batch[0][1]} tokens of this request alone failed: {error} Others go on."
            self._leave(batch[0][0], "failed", RuntimeError(text))

    @torch.inference_mode()
    def _forward(self, batch: list[tuple[Request, int]]) -> tuple[list[int], Cache]:
        """The next token of each, and the states; nothing that others see is written."""
        cache, device = self.pool.read([request.slot for request, _ in batch]), self.pool.device
        keys = KeysInSlots(self.pool, [(request.slot, request.done, n) for request, n in batch])
        rows = [request.tokens[request.done : request.done + n] for request, n in batch]
        if all(n == 1 for _, n in batch):
            logits = self.model(torch.tensor(rows, device=device), cache, keys=keys)[:, 0]
        else:
            ends = torch.tensor([0, *map(len, rows)]).cumsum(0)
            tokens = torch.tensor([[token for row in rows for token in row]], device=device)
            logits = self.model(tokens, cache, ends, keys)[0, ends[1:] - 1]
        if not logits.isfinite().all():
            raise ValueError("the model's numbers are not finite: nan or infinity.")
        return logits.argmax(-1).tolist(), cache

    def health(self) -> dict[str, int]:
        return self.counts | {"running": len(self.running), "waiting": len(self.waiting),
                              "free": len(self.pool.free), "prefixes": len(self.prefixes)}


SEND = 'Send an object of JSON such as {"prompt": "The state", "max_tokens": 20}.'


def asked_of(body: bytes) -> tuple[bytes, int]:
    """Return the prompt and max_tokens that a body asks for; a ValueError says what is wrong with it."""
    try:
        asked = json.loads(body.decode())
    except RecursionError:
        raise ValueError(f"The body has lists or objects that are nested too deeply. {SEND}") from None
    except UnicodeDecodeError as error:
        raise ValueError(f"The body must be UTF-8; found other bytes after {error.start} bytes. {SEND}") from None
    except json.JSONDecodeError as error:
        where = f"line {error.lineno}, column {error.colno}"
        raise ValueError(f"The body must be JSON; found an error at {where}: {error.msg}. {SEND}") from None
    except ValueError:                                                         # Python limits the digits of integers
        raise ValueError(f"The body has a number with too many digits. {SEND}") from None
    if not isinstance(asked, dict):
        raise ValueError(f"The body must be an object; found {as_json(asked)}. {SEND}")
    if "prompt" not in asked:
        names = ", ".join(map(as_json, asked)) or "no field"
        raise ValueError(f"The body must have a prompt; found {names:.80}. {SEND}")
    if others := asked.keys() - {"prompt", "max_tokens"}:
        raise ValueError(f"The body must have prompt and max_tokens alone; found {as_json(min(others)):.80}. {SEND}")
    if not isinstance(asked["prompt"], str):
        raise ValueError(f"prompt must be a text; found {as_json(asked['prompt'])}. {SEND}")
    limit = asked.get("max_tokens", 16)
    if type(limit) is not int:                                                 # true is not a number of tokens
        raise ValueError(f"max_tokens must be a whole number; found {as_json(limit)}. {SEND}")
    try:
        return asked["prompt"].encode(), limit
    except UnicodeEncodeError as error:
        raise ValueError(f"prompt has half of a surrogate pair after {error.start} characters, which is no text. "
                         "Send both halves, or none.") from None


def as_json(value: Any) -> str:
    """Return the beginning of a value as JSON has it."""
    text = json.dumps(value)
    return text if len(text) <= 40 else f"{text[:40]} ..."


def application(engine: Engine) -> Any:
    """The ASGI application."""
    from starlette.applications import Starlette
    from starlette.requests import ClientDisconnect
    from starlette.responses import JSONResponse, Response, StreamingResponse
    from starlette.routing import Route

    largest = 6 * engine.longest + 4096                                        # JSON may write a byte as \u0061

    @contextlib.asynccontextmanager
    async def lifespan(app: Any) -> AsyncIterator[None]:
        steps = asyncio.create_task(engine.run())
        yield
        steps.cancel()

    def check_size(size: int, found: str) -> None:
        if size > largest:
            raise engine.refuse(413, f"The body must be at most {largest} bytes; found {found}. Send a shorter prompt.")

    async def receive(http: Any) -> bytes:
        announced, body = http.headers.get("content-length", ""), bytearray()
        if announced.isdecimal():
            check_size(int(announced), announced)
        async for part in http.stream():
            body += part
            check_size(len(body), "more")
        return bytes(body)

    async def body_of(http: Any) -> bytes:
        """The whole body, unless the server stops before it is complete."""
        receiving, stopping = asyncio.create_task(receive(http)), asyncio.create_task(engine.stopping.wait())
        try:
            await asyncio.wait({receiving, stopping}, return_when=asyncio.FIRST_COMPLETED)
            if not receiving.done():
                raise engine.refuse(503, "The server is stopping. Send the request again later.")
            return receiving.result()
        finally:
            receiving.cancel()
            stopping.cancel()

    def submitted(body: bytes) -> Request:
        try:
            prompt, limit = asked_of(body)
        except ValueError as error:
            raise engine.refuse(400, str(error)) from None
        return engine.submit(prompt, limit)

    async def generate(http: Any) -> Any:
        try:
            request = submitted(await body_of(http))
        except Refused as error:
            return JSONResponse({"error": str(error)}, error.status)
        except ClientDisconnect:
            return Response(status_code=400)                                   # nobody receives it
        return StreamingResponse(lines(request), media_type="application/x-ndjson")

    async def lines(request: Request) -> AsyncIterator[str]:
        decoder = codecs.getincrementaldecoder("utf-8")("replace")
        try:
            while (event := await request.events.get()) is not None:
                if isinstance(event, Exception):
                    yield json.dumps({"error": str(event)}) + "\n"
                    return
                yield json.dumps({"text": decoder.decode(bytes([event]))}) + "\n"
            yield json.dumps({"done": len(request.tokens) - request.prompt, "cached": request.cached}) + "\n"
        finally:                                                               # also where the client has gone
            engine.cancel(request)

    async def health(http: Any) -> Any:
        return JSONResponse(engine.health())

    routes = [Route("/generate", generate, methods=["POST"]), Route("/health", health)]
    return Starlette(routes=routes, lifespan=lifespan)


def server_of(engine: Engine, grace: float, **options: Any) -> Any:
    """A server, with options of uvicorn, whose streams have so many seconds to end after a signal."""
    import uvicorn

    class Server(uvicorn.Server):
        def handle_exit(self, sig: int, frame: Any) -> None:
            super().handle_exit(sig, frame)
            for each in (signal.SIGINT, signal.SIGTERM):
                signal.signal(each, signal.SIG_DFL)                            # a second one ends the process at once

        async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
            ending = asyncio.create_task(self.end_connections())
            await super().shutdown(sockets)
            ending.cancel()

        async def end_connections(self) -> None:
            engine.stopping.set()
            await asyncio.sleep(grace)
            engine.end()
            await asyncio.sleep(1)                                             # errors are sent
            for connection in list(self.server_state.connections):             # those whose clients do not read
                connection.transport.abort()

    return Server(uvicorn.Config(application(engine), **options))


# the load test


@contextlib.asynccontextmanager
async def telling(what: Callable[[], str]) -> AsyncIterator[None]:
    """Say on stderr every two seconds how far it is."""

    async def tell() -> None:
        while True:
            await asyncio.sleep(2)
            print(what(), file=sys.stderr, flush=True)

    task = asyncio.create_task(tell())
    try:
        yield
    finally:
        task.cancel()


async def post(port: int, body: dict, on_line: Callable[[dict], bool]) -> int:
    """Status of a request; `on_line` gets each line of the answer, and hangs up by returning False."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        data = json.dumps(body).encode()
        writer.write(b"POST /generate HTTP/1.1\r\nHost: loopback\r\nConnection: close\r\nContent-Length: "
                     + str(len(data)).encode() + b"\r\n\r\n" + data)
        await writer.drain()
        status = int((await reader.readline()).split()[1])
        while (await reader.readline()).strip():
            pass
        while line := await reader.readline():
            if line.startswith(b"{") and not on_line(json.loads(line)):
                break
        return status
    finally:
        writer.close()


@dataclass
class Load:
    """What clients saw."""

    first: list[float] = field(default_factory=list)                          # seconds to the first token
    between: list[float] = field(default_factory=list)
    texts: dict[str, str] = field(default_factory=dict)
    tokens: int = 0
    statuses: dict[int, int] = field(default_factory=dict)
    errors: list[str] = field(default_factory=list)                           # errors of any kind, each once a request
    failed: list[str] = field(default_factory=list)                           # prompts of the failed requests

    async def client(self, port: int, prompt: str, limit: int, patience: int) -> None:
        """Be a client that hangs up after so many tokens."""
        last, text = time.perf_counter(), list[str]()

        def on_line(line: dict) -> bool:
            nonlocal last
            now = time.perf_counter()
            if "error" in line:
                self.errors.append(line["error"])
                self.failed.append(prompt)
            elif "text" in line:
                (self.between if text else self.first).append(now - last)
                last = now
                text.append(line["text"])
                self.tokens += 1
            elif "done" in line:
                self.texts[prompt] = "".join(text)
            return len(text) < patience

        status = await post(port, {"prompt": prompt, "max_tokens": limit}, on_line)
        self.statuses[status] = self.statuses.get(status, 0) + 1


async def load(engine: Engine, requests: int, clients: int, limit: int, seed: int = 0) -> tuple[Load, float]:
    """A server on a free port of loopback, and clients of it: prompts that share beginnings, some too long, some that
    hang up.  It returns what they saw, and the seconds."""
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        server = server_of(engine, GRACE, log_level="warning")
        serving = asyncio.create_task(server.serve([listening]))
        while not server.started:
            await asyncio.sleep(0.01)
        port, draw, seen = listening.getsockname()[1], random.Random(seed), Load()
        letters = "".join(draw.choices("abcdefgh ", k=engine.longest + 1))
        todo = iter(range(requests))

        async def one_after_another() -> None:
            for n in todo:
                too_long = n % 20 == 7
                begin = draw.randrange(4) * 50
                shared = letters[begin : begin + draw.randrange(20, 3 * CHUNK)]
                prompt = letters if too_long else f"{shared}{n}"
                patience = draw.randrange(1, limit) if n % 10 == 3 else limit + 1
                await seen.client(port, prompt, limit, patience)

        begun = time.perf_counter()
        async with telling(lambda: f"{sum(seen.statuses.values())} of {requests} requests are done"):
            await asyncio.gather(*(one_after_another() for _ in range(clients)))
        seconds = time.perf_counter() - begun
        while engine.running or engine.waiting:                                # those whose clients have gone
            await asyncio.sleep(0.01)
        server.should_exit = True
        await serving
    return seen, seconds


def alone(model: Model, prompt: str, limit: int) -> str:
    """Return what a request should give."""
    with torch.inference_mode():
        answer = model.continued(prompt.encode(), limit)
    return codecs.getincrementaldecoder("utf-8")("replace").decode(answer)     # no text of half a character at the end


async def differ_from_alone(model: Model, texts: dict[str, str], limit: int) -> list[str]:
    """Prompts whose answers differ from those that the model makes of each alone."""
    found: list[bool] = []
    async with telling(lambda: f"{len(found)} of {len(texts)} prompts are compared"):
        for prompt, text in texts.items():
            found.append(text != await asyncio.to_thread(alone, model, prompt, limit))
    return [prompt for prompt, wrong in zip(texts, found) if wrong]


def report(engine: Engine, seen: Load, seconds: float, clients: int) -> str:
    def ms(x: list[float], part: float) -> str:
        return f"{1000 * sorted(x)[min(len(x) - 1, int(part * len(x)))]:,.1f} ms" if x else "-"

    health = engine.health()
    total = sum(seen.statuses.values())
    rows = {
        "requests": f"{total}, {clients} at once, in {seconds:.1f} s: {total / seconds:,.1f} per second",
        "answers": ", ".join(f"{n} with status {status}" for status, n in sorted(seen.statuses.items())),
        "tokens": f"{seen.tokens:,}: {seen.tokens / seconds:,.0f} per second",
        "first token": f"{ms(seen.first, 0.5)}, the slowest percent {ms(seen.first, 0.99)}",
        "token after token": f"{ms(seen.between, 0.5)}, the slowest percent {ms(seen.between, 0.99)}",
        "steps": f"{health['steps']:,}, {health['halved']} of them in parts",
        "prefixes": f"{health['hits']} prompt{'s' * (health['hits'] != 1)} went on from one",
        "cancelled": f"{health['cancelled']}, whose clients hung up: their slots are free for others",
        "slots": f"{health['free']} free, {health['prefixes']} with prefixes, of {engine.slots}",
    }
    return "\n".join(f"{name:18} {text}" for name, text in rows.items())


def positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a positive whole number")
    return int(text)


def port(text: str) -> int:
    if not text.isdecimal() or int(text) >= 1 << 16:
        raise argparse.ArgumentTypeError(f"{text!r} is not a port: 0, for any free one, to 65535")
    return int(text)


def refuse_a_port_in_use(host: str, number: int) -> None:
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as tried:
        tried.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)            # as uvicorn: one just closed is free
        try:
            tried.bind((host, number))
        except OSError as error:
            fix = "Name another --port or --host."
            raise SystemExit(f"cannot listen at {host}:{number}: {error.strerror}. {fix}") from None


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--model", type=Path, metavar="FOLDER",
                         help="of a model that train.py wrote, or convert.py from such a one")
    options.add_argument("--host", default="127.0.0.1", help="%(default)s by default")
    options.add_argument("--port", type=port, default=8000, help="%(default)s by default")
    options.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu",
                         help="%(default)s by default, on this machine")
    options.add_argument("--dtype", choices=("bfloat16", "float16", "float32", "float64"), metavar="DTYPE",
                         default="bfloat16" if torch.cuda.is_available() else "float32",
                         help="%(choices)s; %(default)s by default, on this machine")
    for name, value, meaning in (
        ("slots", 32, "states that are kept: requests that run, and prefixes"),
        ("queue", 64, "requests that may wait for a slot"),
        ("longest", 4096, "tokens of a prompt and its answer together, at most"),
        ("batch", 512, "tokens of prompts in a step, at most"),
        ("grace", GRACE, "seconds that streams have to end after SIGTERM or Ctrl-C"),
    ):
        options.add_argument(f"--{name}", type=positive, default=value, help=f"{meaning}; {value} by default")
    of_model = {"hidden": (128, "channels of the model"), "heads": (4, "heads of a layer"), "layers": (2, "layers")}
    for name, (value, meaning) in of_model.items():
        options.add_argument(f"--{name}", type=positive, help=f"without --model: {meaning}; {value} by default")
    of_load = {"clients": (16, "requests at once"), "max-tokens": (32, "tokens of an answer")}
    for name, (value, meaning) in of_load.items():
        options.add_argument(f"--{name}", type=positive, help=f"with --load: {meaning}; {value} by default")
    options.add_argument("--load", type=positive, metavar="REQUESTS",
                         help="a load test of so many requests, then the end")
    options.add_argument("--check", action="store_true", help="with --load: compare each answer with the model alone")
    args = options.parse_args()
    if not args.load and (args.check or args.clients or args.max_tokens):
        options.error("--check, --clients and --max-tokens are for --load")
    if args.batch < CHUNK:
        options.error(f"--batch {args.batch} is less than the {CHUNK} tokens by which a prompt advances")
    clients, max_tokens = args.clients or of_load["clients"][0], args.max_tokens or of_load["max-tokens"][0]
    clients = min(clients, args.load or clients)
    if args.model and (given := [f"--{name}" for name in of_model if getattr(args, name)]):
        options.error(f"{', '.join(given)}: the model in {args.model} has its sizes. Leave out either.")
    if (args.hidden or 128) % (args.heads or 4):
        options.error(f"--hidden {args.hidden or 128} must be a multiple of --heads {args.heads or 4}")
    try:
        import starlette  # noqa: F401
        import uvicorn  # noqa: F401
    except ModuleNotFoundError as error:
        options.error(f"{error.name} is not installed: pip install starlette uvicorn")
    try:
        torch.empty(0, device=args.device)
    except (RuntimeError, AssertionError) as error:                            # a torch without CUDA asserts
        options.error(f"--device {args.device}: {str(error).splitlines()[0]}")
    torch.manual_seed(0)
    model = Model.read(args.model) if args.model else Model(
        **{name: getattr(args, name) or size for name, (size, _) in of_model.items()})
    model = model.to(args.device, getattr(torch, args.dtype))
    try:
        engine = Engine(model, args.slots, args.queue, args.longest, args.batch)
    except RuntimeError as error:
        options.error(f"--slots {args.slots} and --longest {args.longest} need more memory than there is: "
                      f"{str(error).splitlines()[0]}")
    if not args.load:
        refuse_a_port_in_use(args.host, args.port)
        with contextlib.suppress(KeyboardInterrupt):                           # uvicorn raises it again at the end
            server_of(engine, args.grace, host=args.host, port=args.port).run()
        return
    seen, seconds = asyncio.run(load(engine, args.load, clients, max_tokens))
    print(report(engine, seen, seconds, clients))
    lost = engine.slots - len(engine.pool.free) - len(engine.prefixes)
    wrong = []
    if args.check:
        wrong = asyncio.run(differ_from_alone(model, seen.texts, max_tokens))
        same, prompts = len(seen.texts) - len(wrong), len(seen.texts)
        print(f"{'check':18} {same} of {prompts} prompts have the answers of the model alone")
    failed = engine.counts["failed"]
    if lost or wrong or failed:
        raise SystemExit(f"{lost} slots lost, {len(wrong)} wrong answers, {failed} failed: {seen.errors[-1:]}")


if __name__ == "__main__":
    main()
