"""kda inside vLLM, on a CPU: its loader of plug-ins finds kda, its registry makes kda's subclass of its layer of
Kimi-Linear, and that layer gives, in vLLM's own states, what kda.nn gives with the same weights.
"""

import types

import pytest
import torch

pytest.importorskip("vllm", reason="needs vllm; .ci/engine vllm installs it")

from plugged import declare_entry_points, found
from vllm.config import DeviceConfig, VllmConfig, set_current_vllm_config
from vllm.distributed import init_distributed_environment, initialize_model_parallel
from vllm.forward_context import set_forward_context
from vllm.model_executor.custom_op import op_registry_oot
from vllm.model_executor.layers.mamba.gdn import kimi_gdn_linear_attn as theirs
from vllm.plugins import load_general_plugins
from vllm.v1.attention.backends.gdn_attn import GDNAttentionMetadata

import kda.engines
from kda.engines import vllm as plugin
from kda.nn import KimiDeltaAttention

pytestmark = pytest.mark.peers

HIDDEN, H, D, SLOTS = 48, 2, 16, 6
PREFIX = "model.layers.0.self_attn"
LENGTHS = (70, 41)


@pytest.fixture(scope="module")
def config(tmp_path_factory):
    vllm_config = VllmConfig(device_config=DeviceConfig("cpu"))
    model = types.SimpleNamespace(dtype=torch.float32, use_mla=False, enforce_eager=True, is_moe=False)
    vllm_config.model_config = model
    folder = tmp_path_factory.mktemp("group")
    with set_current_vllm_config(vllm_config):
        init_distributed_environment(1, 0, f"file://{folder}/store", 0, "gloo")
        initialize_model_parallel(1, 1)
        yield vllm_config


@pytest.fixture(scope="module")
def loaded(tmp_path_factory):
    declare_entry_points(tmp_path_factory.mktemp("info"))
    load_general_plugins()


def attention(**linear):
    return types.SimpleNamespace(
        hidden_size=HIDDEN, hidden_act="silu", rms_norm_eps=1e-5,
        linear_attn_config=dict(head_dim=D, num_heads=H, short_conv_kernel_size=4) | linear,
    )


class Served:
    """vLLM's layer with random weights, and its states."""

    def __init__(self, config, **linear):
        torch.manual_seed(0)
        config.compilation_config.static_forward_context.clear()
        self.config = config
        self.layer = theirs.KimiGatedDeltaNetAttention(attention(**linear), config, prefix=PREFIX)
        for parameter in self.layer.parameters():
            torch.nn.init.normal_(parameter, std=0.3)
        self.lower_bound = linear.get("gate_lower_bound")
        conv, recurrent = ((SLOTS, 3, 3 * H * D), (SLOTS, H, D, D))
        if theirs.is_conv_state_dim_first():
            conv = conv[0], conv[2], conv[1]
        self.layer.kv_cache = tuple(torch.full(shape, torch.nan) for shape in (conv, recurrent))

    def prefill(self, x, sizes, slots, begun):
        offsets = torch.tensor([0, *sizes]).cumsum(0).int()
        return self.call(x, num_prefills=len(sizes), num_prefill_tokens=sum(sizes), num_decodes=0, num_decode_tokens=0,
                         has_initial_state=torch.tensor(begun), non_spec_query_start_loc=offsets,
                         non_spec_state_indices_tensor=torch.tensor(slots, dtype=torch.int32))

    def decode(self, x, slots):
        return self.call(x, num_prefills=0, num_prefill_tokens=0, num_decodes=len(slots), num_decode_tokens=len(slots),
                         has_initial_state=None, non_spec_query_start_loc=torch.arange(len(slots) + 1).int(),
                         non_spec_state_indices_tensor=torch.tensor(slots, dtype=torch.int32))

    def call(self, x, **metadata):
        m = GDNAttentionMetadata(num_spec_decodes=0, num_spec_decode_tokens=0, num_actual_tokens=len(x), **metadata)
        with set_forward_context({PREFIX: m}, self.config), torch.no_grad():
            return self.layer(x, torch.arange(len(x)))

    def ours(self):
        """The layer of kda.nn with these weights."""
        layer, P = self.layer, H * D
        joint = layer.in_proj_qkvgfab.weight
        q, k, v, b, f_a = joint.split([P, P, P, H, D])
        conv = layer.conv1d.weight.split(P)
        tensors = {
            "q_proj.weight": q, "k_proj.weight": k, "v_proj.weight": v, "b_proj.weight": b, "f_a_proj.weight": f_a,
            "f_b_proj.weight": layer.f_b_proj.weight, "g_a_proj.weight": layer.g_a_proj.weight, "A_log": layer.A_log,
            "g_b_proj.weight": layer.g_b_proj.weight, "dt_bias": layer.dt_bias, "o_norm.weight": layer.o_norm.weight,
            "o_proj.weight": layer.o_proj.weight,
            **{f"{name}_conv1d.weight": weight for name, weight in zip("qkv", conv)},
        }
        return KimiDeltaAttention.from_checkpoint(tensors, lower_bound=self.lower_bound, norm_eps=layer.o_norm.eps)


def test_its_loader_finds_kda_and_its_registry_makes_our_layer(loaded, config):
    assert found("vllm.general_plugins")
    assert op_registry_oot[plugin.LAYER].__module__ == "kda.engines.vllm"
    kda.engines.vllm_plugin()                                                  # as in another process: nothing changes
    assert isinstance(Served(config).layer, op_registry_oot[plugin.LAYER])


@pytest.mark.parametrize("linear", [{}, {"gate_lower_bound": -5.0}], ids=["softplus", "bounded"])
def test_prefill_in_pieces_and_decode_in_slots_are_kda_nn_on_whole_sequences(linear, loaded, config):
    served = Served(config, **linear)
    x = [torch.randn(n, HIDDEN) for n in LENGTHS]
    with torch.no_grad():
        expected = [served.ours()(each[None])[0] for each in x]
    pieces = [[], []]
    for start, end, begun in ((0, 32, False), (32, 38, True)):
        y = served.prefill(torch.cat([each[start:end] for each in x]), [end - start] * 2, (4, 1), [begun] * 2)
        for piece, part in zip(pieces, y.split(end - start)):
            piece.append(part)
    for t in range(38, min(LENGTHS)):                                          # in a batch padded to four
        y = served.decode(torch.cat([*(each[t : t + 1] for each in x), torch.zeros(2, HIDDEN)]), (4, 1, 0, 0))
        for piece, part in zip(pieces, y.split(1)):
            piece.append(part)
        assert not y[2:].any()
    for piece, whole in zip(pieces, expected):
        got = torch.cat(piece)
        assert (got - whole[: len(got)]).norm() < 1e-5 * whole.norm()
    for states in served.layer.kv_cache:                                       # slots of no request, and the null block
        assert states[[0, 2, 3, 5]].isnan().all() and not states[[1, 4]].isnan().any()


def test_a_batch_may_mix_prefill_and_decode(loaded, config):
    served = Served(config)
    x = [torch.randn(n, HIDDEN) for n in LENGTHS]
    with torch.no_grad():
        expected = [served.ours()(each[None])[0] for each in x]
    served.prefill(x[0][:69], [69], (2,), [False])
    y = served.prefill(torch.cat([x[0][69:], x[1]]), [1, 41], (2, 3), [True, False])
    for got, whole in zip(y.split([1, 41]), (expected[0][69:], expected[1])):
        assert (got - whole).norm() < 1e-5 * whole.norm()


def test_what_kda_does_not_accept_goes_to_vllm_with_a_reason(loaded, config, monkeypatch):
    served, asked = Served(config), []
    monkeypatch.setattr(plugin, "refusal", lambda problem: "no such head dim")
    monkeypatch.setattr(theirs.KimiGatedDeltaNetAttention, "_forward", lambda *args: asked.append(args))
    kda.notices.forget("kda.engines")
    with pytest.warns(kda.notices.KdaNotice, match="left to vLLM: no such head dim"):
        served.prefill(torch.randn(4, HIDDEN), [4], (1,), [False])
    assert len(asked) == 1


def test_a_run_without_metadata_computes_nothing(loaded, config):
    served = Served(config)
    with set_forward_context(None, config), torch.no_grad():
        assert served.layer(torch.randn(4, HIDDEN), torch.arange(4)).shape == (4, HIDDEN)


def test_a_variable_switches_it_off(monkeypatch):
    monkeypatch.setenv("KDA_VLLM", "0")
    monkeypatch.setattr(plugin, "install", lambda: pytest.fail("it was installed"))
    kda.engines.vllm_plugin()


def test_another_vllm_is_left_alone_with_a_reason(monkeypatch):
    monkeypatch.delitem(op_registry_oot, plugin.LAYER, raising=False)
    monkeypatch.setattr(theirs.KimiGatedDeltaNetAttention, "_forward", lambda self, x: None)
    kda.notices.forget("kda.engines")
    with pytest.warns(kda.notices.KdaNotice, match="vllm runs without kda.*must have the arguments"):
        kda.engines.vllm_plugin()
    assert plugin.LAYER not in op_registry_oot
