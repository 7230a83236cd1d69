"""Drafts beside plain decoding: what both have to give."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch

from kda.tools.verify.steps import copied, make_step, tokens_of

Tensor = torch.Tensor


def beside_plain_decoding(
    run: Callable[[dict[str, Any]], dict[str, Tensor]], turns: int = 3, **words: Any
) -> Iterator[tuple[str, Tensor, Tensor]]:
    """Compare calls with drafts, of which some are accepted, and the same tokens in a call for each: (what, one, the
    other)."""
    x = make_step(drafts=True, **words)
    plain = copied(x) | dict.fromkeys(("records", "num_accepted_tokens", "parents"))
    if "conv_weight" in x:
        plain["conv_states"] = plain["conv_states"][:, : x["conv_weight"].shape[1] - 1].contiguous()
    for turn in range(turns):
        new = make_step(drafts=True, **words, seed=turn + 1)
        x |= tokens_of(new) | {"parents": new.get("parents")}
        path, count = _some_accepted(x, turn)
        together = run(x)
        for i in range(int(count.max())):
            each, index = torch.arange(len(path)), path[:, i].long()
            rows = {name: t[each, index].unsqueeze(1) for name, t in tokens_of(new).items()}
            slots = torch.where(i < count, x["ssm_state_indices"], -1).int()                # the others have ended
            one = run(plain | rows | {"ssm_state_indices": slots})
            real = i < count
            yield f"o of token {i} of call {turn}", together["o"][each, index][real], one["o"][:, 0][real]
            if i == 0:
                yield f"states behind the first token of call {turn}", together["states"], one["states"].clone()
        x |= {"num_accepted_tokens": count, "accepted_path": path}


def _some_accepted(x: dict[str, Any], turn: int) -> tuple[Tensor, Tensor]:
    """Return a way from the first token of each sequence (N, T), and how many of it are accepted: one more from call to
    call and from sequence to sequence."""
    N, T = x["q"].shape[:2]
    path, count = torch.zeros(N, T, dtype=torch.int32), torch.ones(N, dtype=torch.int32)
    for n in range(N):
        parents = [*range(-1, T - 1)] if x["parents"] is None else x["parents"][n].tolist()
        while count[n] < 1 + (turn + n + 1) % T:
            later = [t for t in range(int(path[n, count[n] - 1]) + 1, T) if parents[t] == path[n, count[n] - 1]]
            if not later:
                break
            path[n, count[n]] = later[-1]
            count[n] += 1
    return path, count
