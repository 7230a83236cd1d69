"""Kernels whose PTX is damaged at random, by the number of the mutant: a simulator refuses them or runs them.

`python tests/helpers/mutated.py FIRST COUNT` runs mutants, and prints the number of each before it runs.
"""

from __future__ import annotations

import random
import re
import resource
import sys
from pathlib import Path

import planted

from ptxkit.launches import LaunchError
from ptxkit.ptx import PtxError

LIMIT = 20_000  # warp instructions
ROOM = 3 << 30  # bytes that the process may have beside those of torch
NUMBERS = (
    *(0, 1, 2, 3, 7, 31, 32, 64, 255, 4096, 65535),
    *(2**31 - 1, 2**31, 2**32 - 1, 2**32, 2**59, 2**63 - 1, 2**64 - 1, 2**64),
)
PREFIXES = ("%p", "%h", "%r", "%f", "%rd", "%fd", "%q")
_NUMBER = re.compile(r"(?<![\w%.])-?\d+\b")
_REGISTER = re.compile(r"%(?:rd|fd|[phrfq])(\d+)\b")
_MODIFIER = re.compile(r"\.[a-z]\w*(?:::\w+)*")


def _one(pattern, text, rng, new):
    """Return the text with one match of the pattern, chosen at random, replaced."""
    found = [*pattern.finditer(text)]
    if not found:
        return text
    match = rng.choice(found)
    return text[: match.start()] + new(match) + text[match.end() :]


def _operands(text, rng):
    head, space, rest = text.strip().rstrip(";").partition(" ")
    items = rest.split(",")
    change = rng.randrange(3)
    if change == 0:
        items.pop(rng.randrange(len(items)))
    elif change == 1:
        items.insert(rng.randrange(len(items) + 1), rng.choice(items))
    else:
        rng.shuffle(items)
    return f"    {head}{space}{','.join(items)};"


def mutant(text, rng):
    """Return the text after one to three changes of instructions or declarations."""
    lines = text.split("\n")
    body = [n for n, line in enumerate(lines) if line.strip().endswith(";")]
    for _ in range(rng.choice((1, 1, 2, 3))):
        n, other = rng.choice(body), rng.choice(body)
        change = rng.randrange(9)
        if change == 0:
            lines[n] = ""
        elif change == 1:
            lines[n] += lines[other]
        elif change == 2:
            lines[n], lines[other] = lines[other], lines[n]
        elif change in (3, 4):
            lines[n] = _one(_NUMBER, lines[n], rng, lambda m: rng.choice(("", "-")) + str(rng.choice(NUMBERS)))
        elif change == 5:
            lines[n] = _one(_REGISTER, lines[n], rng, lambda m: rng.choice(PREFIXES) + m[1])
        elif change == 6:
            lines[n] = _one(_MODIFIER, lines[n], rng, lambda m: rng.choice(_MODIFIER.findall(text)))
        elif change == 7:
            lines[n] = _one(_MODIFIER, lines[n], rng, lambda m: "")
        else:
            lines[n] = _operands(lines[n], rng)
    return "\n".join(lines)


def run(number):
    """Run the mutant of that number and return what came of it, in a word."""
    rng = random.Random(number)
    path, launched = rng.choice([*planted.KERNELS.values()])
    try:
        done, _ = launched(mutant(path.read_text(), rng), limit=LIMIT, clock=rng.choice((None, None, True)))
    except (PtxError, LaunchError):
        return "refused"
    return "found" if done.findings else "ran"


def main(first, count):
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + ROOM, resource.RLIM_INFINITY))
    for number in range(first, first + count):
        print("mutant", number, end=" ", flush=True)
        print(run(number), flush=True)


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
