"""Programs that run in a process of their own, because what packages replace or find first stays so: what a test does
with such a program, and what programs do with a model."""

import functools
import json
import os
import subprocess
import sys
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parents[2]
TOKENS = torch.arange(1, 41).view(2, 20)


def said_by(program, *arguments):
    """Return the JSON that a program prints last; it can import what tests of this folder can."""
    path = os.pathsep.join(map(os.path.abspath, (ROOT, ROOT / "tests" / "peers", *filter(None, sys.path))))
    ran = subprocess.run([sys.executable, "-c", program, *map(str, arguments)], capture_output=True, text=True,
                         env=os.environ | {"PYTHONPATH": path, "HF_HUB_OFFLINE": "1"}, timeout=300)
    assert ran.returncode == 0, ran.stderr
    return json.loads(ran.stdout.splitlines()[-1])


def counted(module, *names):
    """Let functions of a module note their calls, and return the list in which they note their names."""
    calls = []

    def noted(name, function):
        @functools.wraps(function)
        def call(*args, **options):
            calls.append(name)
            return function(*args, **options)

        return call

    for name in names:
        setattr(module, name, noted(name, getattr(module, name)))
    return calls


def results(model, to_generate=lambda model: None, to_train=lambda model: None):
    """Return logits, the tokens of greedy decoding, and the gradient of a step of training.  What `to_generate` and
    `to_train` do to the model comes before each."""
    to_generate(model.eval())
    with torch.no_grad():
        logits, answer = model(TOKENS).logits, model.generate(TOKENS, max_new_tokens=5, do_sample=False)
    to_train(model.train())
    model(TOKENS).logits.square().mean().backward()
    return logits, answer, model.get_input_embeddings().weight.grad
