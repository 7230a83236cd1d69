"""kda inside SGLang, on a CPU: its loader of plug-ins finds kda, its dispatcher of KDA has kda's kernels where the name
"kda" was asked for, and they give, in SGLang's pool, what one call over whole sequences gives.
"""

import pytest
import torch

pytest.importorskip("sglang", reason="needs sglang; .ci/engine sglang installs it")

from plugged import declare_entry_points, found
from sglang.srt.arg_groups.choices import LINEAR_ATTN_KERNEL_BACKEND_CHOICES
from sglang.srt.layers.attention.linear.kda_backend import KDAKernelDispatcher
from sglang.srt.layers.attention.linear.kernels.kda_triton import TritonKDAKernel
from sglang.srt.layers.attention.linear.utils import LinearAttnKernelBackend as Backend
from sglang.srt.plugins import load_plugins
from sglang.srt.plugins.hook_registry import HookRegistry

import kda
import kda.engines
from kda.engines import sglang as plugin

pytestmark = pytest.mark.peers

HV, K, V = 2, 32, 16
LENGTHS = (150, 70)
OURS = Backend("kda")
GATES = {"softplus": None, "bounded": -5.0}


@pytest.fixture(scope="module", autouse=True)
def loaded(tmp_path_factory):
    declare_entry_points(tmp_path_factory.mktemp("info"))
    load_plugins()


def index(*values):
    return torch.tensor(values, dtype=torch.int32)


class Served:
    """Two sequences, one call over each, and SGLang's dispatcher with a pool."""

    def __init__(self, lower_bound):
        torch.manual_seed(0)
        self.gate = dict(A_log=torch.rand(HV).log(), dt_bias=torch.randn(HV * K), lower_bound=lower_bound)
        self.x = [(torch.randn(1, n, HV, K), torch.randn(1, n, HV, K), torch.randn(1, n, HV, V),
                   torch.randn(1, n, HV, K), torch.randn(1, n, HV)) for n in LENGTHS]
        options = dict(use_qk_l2norm_in_kernel=True, use_gate_in_kernel=True, use_beta_sigmoid_in_kernel=True,
                       output_final_state=True, state_v_first=True)
        self.whole = [kda.chunk_kda(*each, **options, **self.gate) for each in self.x]
        self.at_64 = [kda.chunk_kda(*(t[:, :64] for t in each), **options, **self.gate)[1][0] for each in self.x]
        self.pool = torch.zeros(6, HV, V, K)
        self.pool[[0, 2, 4, 5]] = torch.nan
        self.dispatcher = KDAKernelDispatcher(OURS, OURS, Backend.TRITON)

    def rows(self, *slices):
        return [torch.cat([each[i][:, rows] for each, rows in zip(self.x, slices)], 1) for i in range(5)]

    def extend(self, start, ends, **others):
        sizes = [end - start for end in ends]
        q, k, v, g, beta = self.rows(*(slice(start, end) for end in ends))
        o = self.dispatcher.extend(
            q, k, v, g, beta, ssm_states=self.pool, cache_indices=index(3, 1), beta_is_raw=True,
            query_start_loc=index(0, sizes[0], sum(sizes)), **self.gate, **others,
        )
        return (o[0] if isinstance(o, tuple) else o).split(sizes, 1)

    def decode(self, *tokens):
        """A token each, in a batch padded to three."""
        q, k, v, a, b = (torch.cat([t, t[:, :1]], 1) for t in self.rows(*(slice(n, n + 1) for n in tokens)))
        o = self.dispatcher.decode(q, k, v, a.flatten(2), b, ssm_states=self.pool, cache_indices=index(3, 1, -1),
                                   query_start_loc=index(0, 1, 2, 3), **self.gate)
        assert not o[:, 2].any()
        return o[:, :1], o[:, 1:2]

    def is_right(self, pieces):
        for n, (parts, (o, state)) in enumerate(zip(zip(*pieces), self.whole)):
            got = torch.cat(parts, 1)
            assert (got - o[:, : got.shape[1]]).norm() < 1e-5 * o.norm()
            if got.shape[1] == LENGTHS[n]:
                slot = self.pool[(3, 1)[n]]
                assert (slot - state[0]).norm() < 1e-5 * state.norm()
        assert self.pool[[0, 2, 4, 5]].isnan().all()


def test_its_loader_finds_kda_and_its_dispatcher_has_our_kernels_where_they_are_asked_for():
    assert found("sglang.srt.plugins") and plugin.NAME in LINEAR_ATTN_KERNEL_BACKEND_CHOICES
    assert plugin.DISPATCHER in HookRegistry._patched
    both, prefill = (KDAKernelDispatcher(backend, OURS, Backend.TRITON) for backend in (OURS, Backend.TRITON))
    assert type(both.decode_kernel).__module__ == type(prefill.extend_kernel).__module__ == plugin.__name__
    assert type(prefill.decode_kernel) is type(both.verify_kernel) is TritonKDAKernel
    assert not both.supports_packed_decode


@pytest.mark.parametrize("gate", GATES)
def test_extends_and_decodes_in_slots_are_one_call_over_whole_sequences(gate):
    served = Served(GATES[gate])
    pieces = [served.extend(0, (64, 64)), served.extend(64, (147, 67))]
    pieces += [served.decode(147 + n, 67 + n) for n in range(3)]
    served.is_right(pieces)


def test_the_state_of_a_chunk_that_sglang_tracks_is_left_in_its_buffer():
    served = Served(-5.0)
    track = torch.full((2, HV, V, K), 7.0)
    pieces = [served.extend(0, (147, 67), return_intermediate_states=True, track_state=track,
                            track_chunk_idx=index(1, -1))]
    served.is_right(pieces)
    assert (track[0] - served.at_64[0]).norm() < 1e-5 * track[0].norm() and (track[1] == 7).all()


@pytest.mark.parametrize("method", ["decode", "extend"])
def test_what_kda_does_not_accept_goes_to_sglang_with_a_reason(method, monkeypatch):
    served = Served(-5.0)
    monkeypatch.setattr(plugin, "refusal", lambda problem: "no such head dim")
    monkeypatch.setattr(TritonKDAKernel, method, lambda self, q, *args, **others: torch.zeros(1, 3, HV, V))
    kda.notices.forget("kda.engines")
    with pytest.warns(kda.notices.KdaNotice, match=f"{method} is left to SGLang: no such head dim"):
        served.decode(0, 0) if method == "decode" else served.extend(0, (2, 1))


def test_states_of_all_chunks_are_left_to_sglang(monkeypatch):
    served, asked = Served(-5.0), []
    monkeypatch.setattr(TritonKDAKernel, "extend", lambda self, q, *args, **others: asked.append(others) or q)
    kda.notices.forget("kda.engines")
    with pytest.warns(kda.notices.KdaNotice, match="all states between chunks"):
        served.extend(0, (64, 64), return_intermediate_states=True)
    assert asked[0]["return_intermediate_states"]


def test_a_variable_switches_it_off(monkeypatch):
    monkeypatch.setenv("KDA_SGLANG", "0")
    monkeypatch.setattr(plugin, "install", lambda: pytest.fail("it was installed"))
    kda.engines.sglang_plugin()
