"""Damaged files of weights and configs end examples/convert.py with one line that names the file and the damage."""

import json
import random
import runpy
import sys
from pathlib import Path

import pytest
import torch

from kda import InputError
from kda.nn import CheckpointError, KimiDeltaAttention

NAMES = runpy.run_path(str(Path(__file__).parents[3] / "examples" / "convert.py"))
PREFIX = "model.layers.0.self_attn."
KIMI = {"model_type": "kimi_linear", "rms_norm_eps": 1e-5}


def layer():
    torch.manual_seed(0)
    return KimiDeltaAttention(8, 2, 4)


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """Return the bytes of a small file of weights, which is not damaged."""
    path = tmp_path_factory.mktemp("whole") / "model.safetensors"
    NAMES["save"](layer().to_checkpoint("kimi_linear", PREFIX), path)
    return path.read_bytes()


def parts(data):
    """Return the header and the tensors' bytes."""
    begin = 8 + int.from_bytes(data[:8], "little")
    return json.loads(data[8:begin]), data[begin:]


def joined(header, tensors):
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + tensors


def with_field(data, tensor, **fields):
    """Return the file with other fields for a tensor in its header; a field of None is left out."""
    header, tensors = parts(data)
    header[tensor] = {name: x for name, x in (header[tensor] | fields).items() if x is not None}
    return joined(header, tensors)


def with_tensor(data, tensor, x):
    """Return the file with another tensor under one of its names."""
    header, tensors = parts(data)
    del header[tensor]
    start = 0
    pieces = []
    for about in header.values():
        begin, end = about["data_offsets"]
        pieces.append(tensors[begin:end])
        about["data_offsets"] = [start, start := start + end - begin]
    header[tensor] = {"dtype": "F32", "shape": [*x.shape], "data_offsets": [start, start + 4 * x.numel()]}
    return joined(header, b"".join(pieces) + x.numpy().tobytes())


@pytest.fixture
def converted(monkeypatch, tmp_path):
    """Run the example on a file of weights and a config; return what it exits with."""
    monkeypatch.setitem(NAMES["main"].__globals__, "of_transformers", lambda *_: "not asked here")

    def convert(weights, config):
        monkeypatch.setattr(sys, "argv", ["convert.py", str(tmp_path)])
        (tmp_path / "model.safetensors").write_bytes(weights)
        (tmp_path / "config.json").write_bytes(config if isinstance(config, bytes) else json.dumps(config).encode())
        with pytest.raises(SystemExit) as left:
            NAMES["main"]()
        return left.value.code

    return convert


A, Q, K, NORM = (PREFIX + name for name in ("A_log", "q_proj.weight", "k_proj.weight", "o_norm.weight"))
FILES = {
    "an empty file": (lambda data: b"", "the header is longer than the file"),
    "seven bytes": (lambda data: data[:7], "the header is longer than the file"),
    "a header that is too long": (lambda data: b"\xff" * 8 + data[8:], "the header is longer than the file"),
    "no header": (lambda data: bytes(8), "its header is not JSON: Expecting value"),
    "a header that is not text": (lambda data: joined(b"\xff\xfe{}", b""), "its header is not JSON: 'utf-8' codec"),
    "a header that ends too early": (lambda data: joined(b'{"a": ', b""), "its header is not JSON: Expecting value"),
    "a header that is nested deeply": (lambda data: joined(b"[" * 100_000, b""), "its header is not JSON: "),
    "a header that is a list": (lambda data: joined([1], b""), "its header is not an object of JSON, but [1]"),
    "data that end too early": (lambda data: data[:-1], "bytes; found "),
    "data that go on": (lambda data: data + b"more", "bytes; found "),
    "a tensor that is a number": (lambda data: joined({Q: 3}, b""), "a shape and two data_offsets; found 3"),
    "no dtype": (lambda data: with_field(data, Q, dtype=None), f"{Q!r} needs a dtype, a shape and two data_offsets"),
    "no shape": (lambda data: with_field(data, Q, shape=None), "needs a dtype, a shape and two"),
    "no offsets": (lambda data: with_field(data, Q, data_offsets=None), "needs a dtype, a shape and two"),
    "one offset": (lambda data: with_field(data, Q, data_offsets=[0]), "needs a dtype, a shape and two"),
    "an offset that is text": (lambda data: with_field(data, Q, data_offsets=["0", 4]), "needs a dtype, a shape and"),
    "a negative offset": (lambda data: with_field(data, Q, data_offsets=[-256, 0]), "needs a dtype, a shape and"),
    "offsets in the wrong order": (lambda data: with_field(data, Q, data_offsets=[256, 0]), "cannot have data_offs"),
    "offsets of another tensor": (lambda data: with_field(data, A, data_offsets=[8, 16]), "begins at byte 8 of"),
    "offsets past the end": (lambda data: with_field(data, Q, data_offsets=[1 << 70, (1 << 70) + 256]), "begins at"),
    "a dtype that is a number": (lambda data: with_field(data, Q, dtype=32), "needs a dtype, a shape and two"),
    "a dtype of another size": (lambda data: with_field(data, Q, dtype="BF16"), f"{Q!r}, BF16 of shape [8, 8], cannot"),
    "a dtype that no layer has": (lambda data: with_field(data, Q, dtype="I32"), f"{Q!r} is 'I32'; a layer takes F64"),
    "a shape of another size": (lambda data: with_field(data, Q, shape=[8, 9]), "F32 of shape [8, 9], cannot have"),
    "a size that is a bool": (lambda data: with_field(data, A, shape=[True, 2]), "needs a dtype, a shape and two"),
    "a size that is infinite": (lambda data: with_field(data, A, shape=[float("inf")]), "needs a dtype, a shape and"),
    "a shape with other dimensions": (lambda data: with_field(data, Q, shape=[64]), "a tensor of 2 dimensions"),
    "a shape that is transposed": (lambda data: with_field(data, NORM, shape=[2, 2]), "a tensor of 1 dimensions"),
    "a name of two lines": (lambda data: joined({"a\nb": 1}, b""), "'a\\nb' is no name of a tensor"),
    "a name with half of a pair": (lambda data: joined({"\ud800": 1}, b""), "is no name of a tensor"),
    "a scalar": (lambda data: with_tensor(data, Q, torch.tensor(1.0)), "not empty; found one of shape []"),
    "an empty tensor": (lambda data: with_tensor(data, A, torch.empty(0)), f"{A!r} has no elements: its shape is [0]"),
    "other sizes": (lambda data: with_tensor(data, A, torch.ones(3)), "This is not a KDA layer"),
    "a projection of other sizes": (lambda data: with_tensor(data, K, torch.ones(7, 8)), "found [7, 8]"),
}


@pytest.mark.parametrize("name", FILES)
def test_a_damaged_file_of_weights_is_named_with_what_is_wrong_in_one_line(whole, converted, tmp_path, name):
    damage, says = FILES[name]
    said = converted(damage(whole), KIMI)
    assert isinstance(said, str) and says in said and said.startswith(str(tmp_path)) and "\n" not in said


CONFIGS = {
    "no JSON": (b"{", "config.json is not JSON: Expecting"),
    "no text": (b"\xff", "config.json is not JSON: 'utf-8' codec"),
    "nested deeply": (b"[" * 100_000, "config.json is not JSON: "),
    "a list": ([1], "config.json must be an object of JSON with a model_type, or with a text_config"),
    "no model": ({}, "config.json must be an object of JSON with a model_type"),
    "a model that is a list": (KIMI | {"model_type": [1]}, "config.json must be an object of JSON with a model_type"),
    "a part that is a list": ({"text_config": [KIMI]}, "config.json must be an object of JSON with a model_type"),
    "a part that is missing": ({"text_config": None}, "config.json must be an object of JSON with a model_type"),
    "fields that are a list": (KIMI | {"linear_attn_config": [-5.0]}, "linear_attn_config is a dict, or an object"),
    "fields that are a flag": (KIMI | {"linear_attn_config": False}, "linear_attn_config is a dict, or an object"),
    "a bound that is text": (KIMI | {"linear_attn_config": {"gate_lower_bound": "-5"}}, "or None; found '-5'"),
    "a bound that is positive": (KIMI | {"linear_attn_config": {"gate_lower_bound": 5}}, "or None; found 5"),
    "an epsilon that is text": (KIMI | {"rms_norm_eps": "1e-5"}, "norm_eps must be a finite number >= 0; found '1e-5'"),
    "an epsilon that is infinite": (KIMI | {"rms_norm_eps": 10**400}, "norm_eps must be a finite number >= 0"),
    "a flag that is text": (KIMI | {"model_type": "bailing_hybrid", "kda_safe_gate": "no"}, "True or False as kda_"),
    "an unknown model": (KIMI | {"model_type": "llama"}, "names no lower bound of the gate. Pass --lower-bound, or"),
    "no epsilon": ({"model_type": "fla", "lower_bound": -5.0}, "has no rms_norm_eps, the epsilon of the norm. Pass"),
    "no epsilon of a model that is known": ({"model_type": "kimi_linear"}, "has no rms_norm_eps, the epsilon of the"),
}


@pytest.mark.parametrize("name", CONFIGS)
def test_a_damaged_config_is_named_with_what_is_wrong_in_one_line(whole, converted, name):
    config, says = CONFIGS[name]
    said = converted(whole, config)
    assert isinstance(said, str) and says in said and "\n" not in said


def test_files_that_cannot_be_read_are_named(whole, converted, tmp_path):
    (tmp_path / "more.safetensors").mkdir()
    assert converted(whole, KIMI) == f"{tmp_path / 'more.safetensors'}: Is a directory."


def mutated(draw, data):
    """Return the file with one of the damages that happen to files, at a random place."""
    begin = 8 + int.from_bytes(data[:8], "little")
    place, kind = draw.randrange(begin), draw.randrange(6)
    if kind == 0:                                                              # a byte of the header
        return data[:place] + bytes([draw.randrange(256)]) + data[place + 1 :]
    if kind == 1:
        return data[: draw.randrange(len(data))]
    if kind == 2:                                                              # bytes are lost, or come in between
        return data[:place] + draw.randbytes(draw.randrange(9)) + data[place + draw.randrange(9) :]
    header, tensors = parts(data)
    name = draw.choice([*header])
    value = draw.choice([None, True, -1, 0, 3, 1 << 63, 1e400, "", "F64", [], [0], [8, 8], [0, 1 << 40], {}, [[]]])
    if kind == 3:
        header[name] = value
    elif kind == 4:
        header[name][draw.choice(["dtype", "shape", "data_offsets"])] = value
    else:
        header[draw.choice(["A_log", "", PREFIX + "conv1d.weight", draw.choice([*header])])] = header.pop(name)
    return joined(header, tensors)


def test_random_damage_of_files_and_configs_never_ends_in_a_traceback(whole, converted):
    draw, refused, config = random.Random(0), 0, json.dumps(KIMI | {"linear_attn_config": {"gate_lower_bound": -5.0}})
    for _ in range(200):
        weights, text = whole, config.encode()
        if draw.randrange(4):
            weights = mutated(draw, whole)
        else:
            place = draw.randrange(len(text))
            text = text[:place] + draw.choice([b"", b"[", b'"', b"9", b"-", b"null", b"\xff"]) + text[place + 1 :]
        said = converted(weights, text)
        assert said == 0 or (isinstance(said, str) and "\n" not in said), said
        refused += said != 0
    assert refused > 130


def test_weights_and_configs_of_other_types_are_refused_by_the_layer_itself():
    plain, read = layer().state_dict(), KimiDeltaAttention.from_checkpoint
    for tensors, options, says in (
        (plain | {"A_log": 3}, {"config": KIMI}, "A_log as a tensor of 1 or 2 .*, not empty; found int 3"),
        (plain | {"o_norm.weight": torch.empty(0)}, {"config": KIMI}, r"not empty; found one of shape \[0\]"),
        (plain | {"q_conv1d.weight": torch.ones(())}, {"config": KIMI}, r"of 2 or 3 dimensions, .* of shape \[\]"),
        (plain, {"config": "kimi_linear"}, "where config is a dict, or an object with attributes; found str"),
        (plain, {"config": {"model_type": ["kimi_linear"]}}, "a model_type among kimi_linear"),
    ):
        with pytest.raises(CheckpointError, match=says):
            read(tensors, **options)
    with pytest.raises(InputError, match="norm_eps must be a finite number"):
        KimiDeltaAttention(8, 2, 4, norm_eps=10**400)
