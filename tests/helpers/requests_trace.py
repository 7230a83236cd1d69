"""A generated trace of requests through one pool of states, as an engine would run it: arrivals, prompts cut between
chunks, prefixes that others left, decode steps in a padded batch, cancellations, slots used again and again.

A free slot holds nan, so that a state that nobody left there cannot be read unseen.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import torch

import kda

H, HV, K, V, CHUNK = 1, 2, 8, 4, 32
PREFIX = 3 * CHUNK                           # tokens that requests of one template share at most
TOKENS = ("q", "k", "v", "g", "beta")
OPTIONS = dict(use_qk_l2norm_in_kernel=True, batch_invariant=True)


def tokens(n: int, seed: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    shapes = {"q": (H, K), "k": (H, K), "v": (HV, V), "g": (HV, K), "beta": (HV,)}
    x = {name: torch.randn(1, n, *shape, generator=generator) for name, shape in shapes.items()}
    return x | {"g": -x["g"].abs(), "beta": x["beta"].sigmoid()}


def joined(parts: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    return {name: torch.cat([x[name] for x in parts], 1) for name in TOKENS}


@dataclass
class Request:
    number: int
    template: int
    x: dict[str, torch.Tensor]               # tensors of the prompt, then of what is decoded
    prompt: int
    slot: int = -1
    done: int = 0                            # tokens behind its state
    hit: int = 0                             # how many of them a prefix that another request left brought
    outputs: list[torch.Tensor] = field(default_factory=list)
    cancelled: bool = False

    @property
    def tokens(self) -> int:
        return self.x["q"].shape[1]

    def rows(self, n: int) -> dict[str, torch.Tensor]:
        return {name: x[:, self.done : self.done + n] for name, x in self.x.items()}


def request(number: int, draw: random.Random) -> Request:
    template, shared = draw.randrange(4), draw.randrange(PREFIX + 1)
    prompt, decoded = shared + draw.randrange(1, 70), draw.randrange(5)
    prefix = {name: x[:, :shared] for name, x in tokens(PREFIX, -1 - template).items()}
    x = joined([prefix, tokens(prompt + decoded - shared, number)])
    # what it shares with others of its template is known by whole chunks alone
    return Request(number, template if shared >= CHUNK else -1, x, prompt)


def alone(r: Request) -> torch.Tensor:
    """Return o of all tokens of a request: the prompt in one call, then token by token."""
    parts = [{n: x[:, : r.prompt] for n, x in r.x.items()}, {n: x[:, r.prompt :] for n, x in r.x.items()}]
    o, state = kda.chunk_kda(**parts[0], chunk_size=CHUNK, output_final_state=True, **OPTIONS)
    return torch.cat([o, kda.fused_recurrent_kda(**parts[1], initial_state=state, **OPTIONS)[0]], 1)


class Engine:
    """An engine runs requests over `slots` states, up to `batch` of them at once."""

    def __init__(self, slots: int, batch: int, draw: random.Random):
        self.pool = torch.full((slots, HV, K, V), torch.nan)
        self.free, self.batch, self.draw = list(range(slots)), batch, draw
        self.running: list[Request] = []
        self.prefixes: dict[tuple[int, int], int] = {}                        # (template, tokens) -> slot, oldest first
        self.hits = self.reused = 0
        self._used: set[int] = set()

    def release(self, slot: int) -> None:
        assert slot not in self.free, f"slot {slot} is released twice"
        self.pool[slot] = torch.nan
        self.free.append(slot)

    def take(self, busy: set[int]) -> int | None:
        """Return a free slot, or that of the oldest prefix that this step does not read."""
        if not self.free:
            oldest = next((key for key, slot in self.prefixes.items() if slot not in busy), None)
            if oldest is None:
                return None
            self.release(self.prefixes.pop(oldest))
        slot = self.free.pop(self.draw.randrange(len(self.free)))
        self.reused += slot in self._used
        self._used.add(slot)
        return slot

    def admit(self, r: Request) -> bool:
        slot = self.take(set()) if len(self.running) < self.batch else None
        if slot is None:
            return False
        r.slot = slot
        self.running.append(r)
        return True

    def start_of(self, r: Request) -> int:
        """Return the slot that a request goes on from."""
        if r.done:
            return r.slot
        for n in range(min(self.shared(r), (r.prompt - 1) // CHUNK * CHUNK), 0, -CHUNK):
            if (r.template, n) in self.prefixes:
                key = r.template, n
                self.prefixes[key] = self.prefixes.pop(key)                    # the youngest now
                r.done = r.hit = n
                self.hits += 1
                return self.prefixes[key]
        return -1

    def shared(self, r: Request) -> int:
        """Return how many tokens, in whole chunks, a request shares with its template."""
        if r.template < 0:
            return 0
        same = (r.x["k"][0, :PREFIX] == tokens(PREFIX, -1 - r.template)["k"][0, : r.tokens]).flatten(1).all(1)
        return int(same.long().cumprod(0).sum()) // CHUNK * CHUNK

    def prefill(self) -> None:
        waiting = [r for r in self.running if r.done < r.prompt]
        batch = self.draw.sample(waiting, min(len(waiting), self.draw.randrange(1, 4)))
        if not batch:
            return
        starts = [self.start_of(r) for r in batch]
        sizes = [min(CHUNK * self.draw.randrange(1, 4), r.prompt - r.done) for r in batch]
        offsets, slots = torch.zeros(len(batch), 2, dtype=torch.int64), torch.full((len(batch), 2), -1)
        busy = {*starts}
        for i, (r, size) in enumerate(zip(batch, sizes)):
            inner = range((r.done // CHUNK + 1) * CHUNK, min(r.done + size, self.shared(r)) + 1, CHUNK)
            for e, n in enumerate([n for n in inner if (r.template, n) not in self.prefixes][:2]):
                slot = self.take(busy)
                if slot is not None:
                    offsets[i, e], slots[i, e] = n - r.done, slot
                    self.prefixes[r.template, n] = slot
                    busy.add(slot)
        x = joined([r.rows(size) for r, size in zip(batch, sizes)])
        o, _ = kda.chunk_kda(
            **x, chunk_size=CHUNK, cu_seqlens=torch.tensor([0, *sizes]).cumsum(0), initial_state=self.pool,
            ssm_state_indices=torch.tensor([r.slot for r in batch]), initial_state_indices=torch.tensor(starts),
            checkpoint_offsets=offsets, checkpoint_indices=slots, **OPTIONS,
        )
        self.move(batch, sizes, o.split(sizes, 1))

    def decode(self) -> None:
        batch = [r for r in self.running if r.prompt <= r.done < r.tokens]
        if not batch:
            return
        padding = self.batch - len(batch)
        x = {n: torch.cat([*(r.rows(1)[n] for r in batch), torch.zeros(padding, 1, *batch[0].x[n].shape[2:])])
             for n in TOKENS}
        slots = torch.tensor([r.slot for r in batch] + [-1] * padding)
        o, _ = kda.fused_recurrent_kda(**x, initial_state=self.pool, ssm_state_indices=slots, **OPTIONS)
        assert not o[len(batch) :].any()
        self.move(batch, [1] * len(batch), o[: len(batch)].split(1))

    def move(self, batch: list[Request], sizes: list[int], outputs) -> None:
        for r, size, o in zip(batch, sizes, outputs):
            r.outputs.append(o)
            r.done += size

    def leave(self) -> list[Request]:
        """Take out who is done; some others change their minds."""
        for r in self.running:
            r.cancelled = r.done < r.tokens and self.draw.random() < 0.02
        left = [r for r in self.running if r.cancelled or r.done == r.tokens]
        self.running = [r for r in self.running if r not in left]
        for r in left:
            self.release(r.slot)
        return left


def run(requests: int, engine: type[Engine] = Engine, slots: int = 12, batch: int = 6, seed: int = 0) -> Engine:
    """Run a whole trace; each request that leaves is compared with the same request alone."""
    draw = random.Random(seed)
    server, arrived, waiting, left = engine(slots, batch, draw), 0, [], 0
    while left < requests:
        for _ in range(min(draw.randrange(4), requests - arrived)):
            waiting.append(request(arrived, draw))
            arrived += 1
        while waiting and server.admit(waiting[0]):
            waiting.pop(0)
        server.prefill()
        server.decode()
        for r in server.leave():
            left += 1
            expected = alone(r)[:, r.hit : r.done]
            found = torch.cat([expected[:, :0], *r.outputs], 1)
            wrong = f"request {r.number}: {r.done} of {r.tokens} tokens, {r.hit} of a prefix"
            assert torch.equal(found, expected), wrong
    assert not server.running and not waiting
    for slot in server.prefixes.values():
        server.release(slot)
    assert sorted(server.free) == list(range(slots)), "a slot is lost"
    return server
