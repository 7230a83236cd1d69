"""One broken call for every row of kda.checks.calls: `python tests/helpers/broken.py` writes docs/data/errors.json."""

import json
import pathlib
import warnings

import torch
from broken_decode import CASES as DECODE
from broken_parallel import CASES as PARALLEL
from naive import make

import kda

FILE = pathlib.Path(__file__).parents[2] / "docs" / "data" / "errors.json"


def chunk(lengths=None, drop=(), options=None, make_options=None, function=None, **replaced):
    """Make a good call of chunk_kda with some arguments replaced by bad ones."""
    function = function or kda.chunk_kda
    shape = {"B": 1, "T": 8} if lengths is None else {"lengths": lengths}
    call = make(dtype=torch.float32, **shape, **(make_options or {}))
    arguments = {n: x for n, x in (call.arguments | (options or {}) | replaced).items() if n not in drop}
    if function is kda.chunk_kda_bwd:
        arguments = {"do": call.do, "dht": call.dht} | arguments
    if function is kda.fused_recurrent_kda:
        arguments.pop("chunk_size")
    with torch.no_grad():
        return function(**arguments)


BUFFER = torch.zeros(48)


def recurrent(*args, **keywords):
    return chunk(*args, function=kda.fused_recurrent_kda, **keywords)


def backward(*args, **keywords):
    return chunk(*args, function=kda.chunk_kda_bwd, **keywords)


def recording(**options):
    """Make a good call whose q requires a gradient."""
    call = make(B=1, T=8, dtype=torch.float32)
    call.tensors["q"].requires_grad_()
    return kda.chunk_kda(**call.arguments, **options)


def recording_state():
    call = make(B=1, T=8, dtype=torch.float32, chunk_size=None)
    call.tensors["initial_state"].requires_grad_()
    return kda.fused_recurrent_kda(**call.arguments, inplace_final_state=True)


def recording_into_out():
    call = make(B=1, T=8, dtype=torch.float32, chunk_size=None)
    call.tensors["q"].requires_grad_()
    return kda.fused_recurrent_kda(**call.arguments, out=zeros(1, 8, 2, 3))


def pool(lengths=(3, 5), slots=(0, 1), **keywords):
    """Make a good call of two sequences and a pool of three slots, with some arguments replaced by bad ones."""
    arguments = {"initial_state": zeros(3, 2, 5, 3), "ssm_state_indices": index(*slots)} | keywords
    return chunk([*lengths], **arguments)


def recording_a_pool():
    call = make(B=1, T=8, dtype=torch.float32)
    call.tensors["q"].requires_grad_()
    return kda.chunk_kda(**call.arguments, ssm_state_indices=index(0))


def gate(**replaced):
    return kda.fused_kda_gate(**({"g": zeros(3, 2, 5), "A_log": zeros(2), "dt_bias": zeros(10)} | replaced))


def both_layouts():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return chunk(options={"state_v_first": True, "transpose_state_layout": True})


def other_saved():
    saved = chunk([3, 5], function=kda.chunk_kda_fwd, options={"disable_recompute": True}).saved
    cut = saved.tensors._replace(w=saved.tensors.w[1:])
    return backward([3, 5], options={"disable_recompute": True}, saved=saved._replace(tensors=cut))


def saved_at_another_scale():
    saved = chunk(function=kda.chunk_kda_fwd, options={"disable_recompute": True, "scale": 0.25}).saved
    return backward(options={"disable_recompute": True, "scale": 0.5}, saved=saved)


async def decorated_in_vain():
    """Its body runs after the call."""


def elsewhere(name):
    return make(B=1, T=8, dtype=torch.float32).tensors[name].to(META)


def zeros(*shape, dtype=torch.float32, device="cpu"):
    return torch.zeros(*shape, dtype=dtype, device=device)


def index(*values):
    return torch.tensor(values)


GATED = {"use_gate_in_kernel": True}
SPARSE = zeros(1, 8, 2, 5).to_sparse()
POOL = ("initial_state_indices", "checkpoint_offsets", "checkpoint_indices")
AT = {"checkpoint_offsets": torch.tensor([[0], [0]])}
EIGHT_SLOTS = zeros(1, 8, dtype=torch.int64)
META = "meta"  # stands for another device on a machine with one

CASES = {
    **{f"{n}.type": lambda n=n: chunk(**{n: [1.0]}) for n in ("q", "k", "v", "g", "beta", "A_log", "dt_bias")},
    **{f"{n}.type": lambda n=n: chunk(**{n: [1.0]}) for n in ("initial_state", "cu_seqlens", "cu_seqlens_cpu")},
    **{f"{n}.type": lambda n=n: recurrent(**{n: [0]}) for n in ("ssm_state_indices", "num_accepted_tokens", "out")},
    **{f"{n}.type": lambda n=n: backward(**{n: 1.0}) for n in ("do", "dht")},
    "scale.type": lambda: chunk(scale="0.1"),
    "lower_bound.type": lambda: chunk(options=GATED | {"lower_bound": "-5"}),
    "chunk_size.type": lambda: chunk(chunk_size="64"),
    "backend.type": lambda: chunk(backend=90),
    "return_intermediate_states.grad": lambda: recording(return_intermediate_states=True),
    "inplace_final_state.grad": recording_state,
    "ssm_state_indices.grad": recording_a_pool,
    "out.grad": recording_into_out,
    "q.shape": lambda: chunk(q=zeros(8, 2, 5)),
    "q.dtype": lambda: chunk(q=zeros(1, 8, 2, 5, dtype=torch.int32)),
    "q.head_dim": lambda: chunk(q=zeros(1, 8, 2, 257)),
    **{f"{n}.device": lambda n=n: chunk(**{n: elsewhere(n)}) for n in ("k", "v", "g", "beta")},
    "A_log.device": lambda: chunk(options=GATED, A_log=zeros(2, device=META)),
    "dt_bias.device": lambda: chunk(options=GATED, A_log=zeros(2), dt_bias=zeros(10, device=META)),
    "initial_state.device": lambda: chunk(initial_state=zeros(1, 2, 5, 3, device=META)),
    "cu_seqlens.device": lambda: chunk(cu_seqlens=index(0, 8).to(META)),
    "cu_seqlens_cpu.device": lambda: chunk(cu_seqlens=index(0, 8), cu_seqlens_cpu=index(0, 8).to(META)),
    "ssm_state_indices.device": lambda: recurrent(ssm_state_indices=index(0).to(META)),
    "num_accepted_tokens.device": lambda: recurrent(ssm_state_indices=index(0), num_accepted_tokens=index(1).to(META)),
    "do.device": lambda: backward(do=zeros(1, 8, 2, 3, device=META)),
    "dht.device": lambda: backward(dht=zeros(1, 2, 5, 3, device=META)),
    "out.device": lambda: recurrent(out=zeros(1, 8, 2, 3, device=META)),
    "k.shape": lambda: chunk(k=zeros(1, 8, 2, 4)),
    "k.dtype": lambda: chunk(k=zeros(1, 8, 2, 5, dtype=torch.bfloat16)),
    "v.shape": lambda: chunk(v=zeros(1, 9, 2, 3)),
    "v.dtype": lambda: chunk(v=zeros(1, 8, 2, 3, dtype=torch.float16)),
    "v.heads": lambda: chunk(v=zeros(1, 8, 3, 3)),
    "g.heads_first": lambda: chunk(g=zeros(1, 2, 8, 5)),
    "g.shape": lambda: chunk(g=zeros(1, 8, 3)),
    "g.dtype": lambda: chunk(g=zeros(1, 8, 2, 5, dtype=torch.int64)),
    "beta.shape": lambda: chunk(beta=zeros(1, 8, 2, 3)),
    "beta.dtype": lambda: chunk(beta=zeros(1, 8, 2, dtype=torch.bool)),
    "A_log.numel": lambda: chunk(options=GATED, A_log=zeros(3)),
    "A_log.dtype": lambda: chunk(options=GATED, A_log=zeros(2, dtype=torch.int32)),
    "A_log.unused": lambda: chunk(A_log=zeros(2)),
    "A_log.missing": lambda: chunk(options=GATED),
    "dt_bias.numel": lambda: chunk(options=GATED, A_log=zeros(2), dt_bias=zeros(2)),
    "dt_bias.dtype": lambda: chunk(options=GATED, A_log=zeros(2), dt_bias=zeros(10, dtype=torch.int32)),
    "dt_bias.unused": lambda: chunk(dt_bias=zeros(10)),
    "lower_bound.value": lambda: chunk(options=GATED | {"lower_bound": 5.0}),
    "safe_gate.promise": lambda: chunk(options=GATED | {"safe_gate": True}, A_log=zeros(2)),
    "allow_neg_eigval.sigmoid": lambda: chunk(allow_neg_eigval=True),
    "scale.value": lambda: chunk(scale=float("nan")),
    "chunk_size.value": lambda: chunk(chunk_size=48),
    "cu_seqlens.shape": lambda: chunk(cu_seqlens=zeros(2, 2, dtype=torch.int64)),
    "cu_seqlens.dtype": lambda: chunk(cu_seqlens=zeros(2)),
    "cu_seqlens.batch": lambda: kda.chunk_kda(**make(B=2, T=4, initial_state=False).arguments, cu_seqlens=index(0, 4)),
    "cu_seqlens_cpu.alone": lambda: chunk(cu_seqlens_cpu=index(0, 8)),
    "cu_seqlens_cpu.dtype": lambda: chunk(cu_seqlens=index(0, 8), cu_seqlens_cpu=zeros(2)),
    "initial_state.shape": lambda: chunk(initial_state=zeros(1, 2, 3, 5)),
    "initial_state.dtype": lambda: chunk(initial_state=zeros(1, 2, 5, 3, dtype=torch.float16)),
    "do.shape": lambda: backward(do=zeros(1, 8, 2, 5)),
    "do.dtype": lambda: backward(do=zeros(1, 8, 2, 3, dtype=torch.int32)),
    "dht.shape": lambda: backward(dht=zeros(1, 2, 3, 5)),
    "dht.dtype": lambda: backward(dht=zeros(1, 2, 5, 3, dtype=torch.int32)),
    **{f"{n}.type": lambda n=n: pool(**{n: [0]}) for n in POOL},
    **{f"{n}.device": lambda n=n: pool(**{n: index(0, 0).to(META)}) for n in POOL},
    **{f"{n}.dtype": lambda n=n, s=s: pool(**dict(AT, **{n: zeros(*s)})) for n, s in
       {"initial_state_indices": (2,), "checkpoint_offsets": (2, 1), "checkpoint_indices": (2, 1)}.items()},
    "ssm_state_indices.intermediate": lambda: pool(options={"return_intermediate_states": True}),
    "ssm_state_indices.backward": lambda: backward(ssm_state_indices=index(0)),
    "ssm_state_indices.layout": lambda: pool(initial_state=zeros(3, 5, 2, 3).transpose(1, 2)),
    "initial_state_indices.shape": lambda: pool(initial_state_indices=index(0)),
    "initial_state_indices.pool": lambda: chunk(initial_state_indices=index(0)),
    "initial_state_indices.range": lambda: pool(initial_state_indices=index(0, 3)),
    "checkpoint_offsets.shape": lambda: pool(checkpoint_offsets=index(0, 0)),
    "checkpoint_offsets.pool": lambda: chunk(checkpoint_offsets=index([0]), checkpoint_indices=index([0])),
    "checkpoint_offsets.values": lambda: pool([40, 5], checkpoint_offsets=index([20], [0]),
                                              checkpoint_indices=index([2], [-1])),
    "checkpoint_offsets.twice": lambda: pool([40, 5], (0, -1), checkpoint_offsets=index([0, 32, 0], [0, 0, 0]),
                                             checkpoint_indices=index([2, -1, 1], [-1, -1, -1])),
    "checkpoint_indices.shape": lambda: pool(checkpoint_offsets=index([0], [0])),
    "checkpoint_indices.range": lambda: pool(**AT, checkpoint_indices=index([3], [-1])),
    "checkpoint_indices.shared": lambda: pool(**AT, checkpoint_indices=index([1], [-1])),
    "ssm_state_indices.shape": lambda: recurrent(ssm_state_indices=index(0, 0)),
    "ssm_state_indices.dtype": lambda: recurrent(ssm_state_indices=zeros(1)),
    "ssm_state_indices.pool": lambda: recurrent(ssm_state_indices=index(0), initial_state=None),
    "num_accepted_tokens.shape": lambda: recurrent(ssm_state_indices=EIGHT_SLOTS, num_accepted_tokens=index(1, 1)),
    "num_accepted_tokens.dtype": lambda: recurrent(ssm_state_indices=EIGHT_SLOTS, num_accepted_tokens=zeros(1)),
    "num_accepted_tokens.slots": lambda: recurrent(ssm_state_indices=index(0), num_accepted_tokens=index(1)),
    "inplace_final_state.state": lambda: recurrent(initial_state=None, inplace_final_state=True),
    "out.shape": lambda: recurrent(out=zeros(1, 8, 2, 5)),
    "out.dtype": lambda: recurrent(out=zeros(1, 8, 2, 3, dtype=torch.float64)),
    "cu_seqlens.values": lambda: chunk([3, 5], cu_seqlens=index(0, 5, 3)),
    "cu_seqlens_cpu.differs": lambda: chunk([3, 5], cu_seqlens_cpu=index(0, 4, 8)),
    "cu_seqlens_cpu.values": lambda: chunk([3, 5], cu_seqlens_cpu=index(0, 3, 9)),
    "ssm_state_indices.range": lambda: recurrent([3, 5], ssm_state_indices=index(0, 2)),
    "ssm_state_indices.shared": lambda: recurrent([3, 5], ssm_state_indices=index(1, 1)),
    "ssm_state_indices.per_token": lambda: recurrent([3, 5], ssm_state_indices=torch.tensor([[0, -1], [1, -1]])),
    "num_accepted_tokens.range": lambda: recurrent(
        [2, 1], ssm_state_indices=torch.tensor([[0, -1], [1, -1]]), num_accepted_tokens=index(1, 0)
    ),
    "inplace_final_state.overlap": lambda: recurrent(
        initial_state=zeros(1, 1, 5, 3).expand(1, 2, 5, 3), inplace_final_state=True
    ),
    "inplace_final_state.negated": lambda: recurrent(
        initial_state=torch._neg_view(zeros(1, 2, 5, 3)), inplace_final_state=True
    ),
    "inplace_final_state.shared": lambda: recurrent(
        v=BUFFER[:48].view(1, 8, 2, 3), initial_state=BUFFER[18:].view(1, 2, 5, 3), inplace_final_state=True
    ),
    "out.overlap": lambda: recurrent(out=zeros(1, 8, 1, 3).expand(1, 8, 2, 3)),
    **{f"gate.{n}.type": lambda n=n: gate(**{n: 1.0}) for n in ("g", "A_log", "dt_bias")},
    "gate.device": lambda: gate(A_log=zeros(2, device=META)),
    "gate.g.shape": lambda: gate(g=zeros(5)),
    **{f"gate.{n}.dtype": lambda n=n, s=s: gate(**{n: zeros(*s).int()}) for n, s in
       {"g": (3, 2, 5), "A_log": (2,), "dt_bias": (10,)}.items()},
    "gate.A_log.numel": lambda: gate(A_log=zeros(5)),
    "gate.dt_bias.numel": lambda: gate(dt_bias=zeros(2)),
    "gate.A_log.missing": lambda: gate(A_log=None),
    "gate.lower_bound.value": lambda: gate(lower_bound=0.0),
    "gate.output_dtype.value": lambda: gate(output_dtype="float32"),
    "keyword.unknown": lambda: chunk(use_gate_in_kernal=True),
    "flag.type": lambda: chunk(output_final_state="no"),
    "state_layout.both": both_layouts,
    "cp_context.none": lambda: chunk(cp_context=object(), function=kda.chunk_kda_fwd),
    "max_num_seqs.type": lambda: chunk(max_num_seqs="4"),
    "max_num_seqs.value": lambda: chunk([3, 5], max_num_seqs=1),
    "saved.kind": lambda: backward(saved=(1, 2)),
    "saved.shape": other_saved,
    "saved.options": saved_at_another_scale,
    "backend.name": lambda: chunk(backend="refrence"),
    "arch.type": lambda: chunk(function=kda.explain, arch=90),
    "arch.name": lambda: chunk(function=kda.explain, arch="h1000"),
    "backend.decorated": lambda: kda.use_backend("reference")(decorated_in_vain),
    "backend.entered": lambda: kda.use_backend("reference").__exit__(None, None, None),
    **PARALLEL,
    **DECODE,
}


def message(case):
    try:
        case()
    except kda.InputError as error:
        return error
    raise AssertionError("the broken call went through")


def messages():
    """Return id -> argument and message, without the id at its end."""
    found = {id: message(case) for id, case in CASES.items()}
    return {id: [error.argument, str(error).removesuffix(f" [{error.check}]")] for id, error in found.items()}


if __name__ == "__main__":
    lines = [f"{json.dumps(id)}: {json.dumps(row, ensure_ascii=False)}" for id, row in messages().items()]
    FILE.write_text("{\n" + ",\n".join(lines) + "\n}\n")
