"""kda as a kernel of Hugging Face's `kernels`, loaded from a folder as `use_kernels=True` loads one from the hub."""

import json
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
from programs import ROOT, said_by

import kda

pytest.importorskip("transformers.models.kimi_linear", reason="needs a transformers that has kimi_linear")
kernels = pytest.importorskip("kernels", reason="needs kernels")

pytestmark = pytest.mark.peers
LAYERS = {"chunk_kda": "chunk_kimi_delta_attention", "fused_recurrent_kda": "recurrent_kimi_delta_attention"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("hub")
    runpy.run_path(str(ROOT / ".ci" / "hub"))["write"](folder)
    return folder


def test_the_folder_has_what_kernels_reads_for_each_backend(folder):
    for backend in ("cuda", "cpu"):
        variant = folder / "build" / f"torch-{backend}"
        metadata = json.loads((variant / "metadata.json").read_text())
        assert metadata["backend"] == {"type": backend} and metadata["name"] == "kda"
        assert (variant / "kda" / "__init__.py").exists() and (variant / "ptxkit" / "py.typed").exists()
    assert kernels.get_local_kernel(folder).chunk_kda is kda.chunk_kda
    assert not [path for path in folder.rglob("*") if path.name in ("__pycache__", "docs", "benchmarks")]


def test_a_kernel_from_the_folder_runs_where_kda_is_not_installed(folder, tmp_path):
    code = f"""
import sys
from pathlib import Path
sys.path[:] = [each for each in sys.path if each and not Path(each, "kda", "__init__.py").exists()]
sys.path.append({str(Path(kernels.__file__).parents[1])!r})
import torch
from kernels import get_local_kernel
kernel = get_local_kernel(Path({str(folder)!r}))
q = torch.randn(1, 70, 2, 16)
o, _ = kernel.chunk_kda(q, q, q, -q.abs(), torch.rand(1, 70, 2))
print(tuple(o.shape), sys.modules["kda"].__file__)
"""
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=tmp_path, timeout=300)
    assert ran.stdout.strip() == f"(1, 70, 2, 16) {folder}/build/torch-cpu/kda/__init__.py", ran.stderr


PROGRAM = """
import json
import sys
from collections import Counter
from pathlib import Path

import small_models
from kernels import LocalLayerRepository, Mode, kernelize, use_kernel_forward_from_hub, use_kernel_mapping
from programs import counted, results

import kda.hub

folder, layers = Path(sys.argv[1]), json.loads(sys.argv[2])
module = small_models.module_of("kimi_linear")
with small_models.in_torch("kimi_linear"):
    expected = results(small_models.model_of("kimi_linear"))
    calls, found = counted(kda.hub, *layers), []
    model = small_models.model_of("kimi_linear")
    for name, layer in layers.items():
        function = use_kernel_forward_from_hub(name)(getattr(module, layer))
        setattr(module, layer, function)
        model.add_module(layer, function)
    for mode in (Mode.INFERENCE, Mode.TRAINING):
        mapping = {name: {"cpu": {mode: LocalLayerRepository(folder, layer_name=layer)}}
                   for name, layer in layers.items() if mode is Mode.INFERENCE or name == "chunk_kda"}
        with use_kernel_mapping(mapping, inherit_mapping=False):
            kernelize(model.train(mode is Mode.TRAINING), mode=mode, device="cpu")
        found.append(results(model))
        model.zero_grad()
print(json.dumps({
    "logits": small_models.distance(found[0][0], expected[0]), "tokens": bool((found[0][1] == expected[1]).all()),
    "gradient": small_models.distance(found[1][2], expected[2]), "calls": Counter(calls),
}))
"""


def test_a_model_with_use_kernels_calls_kda_and_gives_its_own_logits_tokens_and_gradients(folder):
    """Functions are decorated as transformers does it, which wants a newer `kernels` than there is; and in a process of
    its own, because what is replaced stays replaced."""
    said = said_by(PROGRAM, folder, json.dumps(LAYERS))
    assert said["tokens"] and said["calls"].keys() == {"chunk_kda", "fused_recurrent_kda"}
    assert said["logits"] < 1e-4 and said["gradient"] < 1e-4, said


ON_THE_PAGE = """
import json
import sys
from collections import Counter

import transformers.utils
import transformers.utils.import_utils

sys.modules["fla"] = None                                                # what is not replaced is torch code
for module in (transformers.utils, transformers.utils.import_utils):     # it wants a newer `kernels` than there is
    module.is_kernels_available = lambda *versions: True
from transformers.utils import kernel_config

kernel_config.KERNELS_SUPPORTED_DEVICE_TYPES = ["cpu"]                   # it wants a GPU

import small_models
from programs import counted, results

import kda.hub

names = {}
expected = results(small_models.model_of("kimi_linear"))
calls = counted(kda.hub, "chunk_kda", "fused_recurrent_kda")
*begins, to_generate, to_train = sys.argv[1].splitlines()
exec("\\n".join(begins), names)
ends = (lambda model, line=line: exec(line, names | {"model": model}) for line in (to_generate, to_train))
found = results(small_models.model_of("kimi_linear"), *ends)
print(json.dumps({
    "logits": small_models.distance(found[0], expected[0]), "tokens": bool((found[1] == expected[1]).all()),
    "gradient": small_models.distance(found[2], expected[2]), "calls": Counter(calls),
}))
"""


def test_the_page_says_how_a_model_takes_kda_from_a_folder(folder):
    page = (ROOT / "docs" / "layer.md").read_text()
    (code,) = re.findall(r"^```py\n(from transformers import KernelConfig\n.*?)^```", page, re.DOTALL | re.MULTILINE)
    said = said_by(ON_THE_PAGE, code.replace("/path/to/kda-hub", str(folder)))
    assert said["calls"] == {"chunk_kda": 3, "fused_recurrent_kda": 4}, "two prompts and a step, and four tokens"
    assert said["tokens"] and said["logits"] < 1e-4 and said["gradient"] < 1e-4, said


def test_a_folder_that_is_not_empty_is_left_as_it_is(folder):
    with pytest.raises(SystemExit, match="is not empty"):
        runpy.run_path(str(ROOT / ".ci" / "hub"))["write"](folder)
