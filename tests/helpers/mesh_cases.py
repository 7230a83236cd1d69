"""Calls on meshes of processes beside one process; what each rank runs, for test_mesh.py."""

import torch
import torch.distributed as dist
from naive import make
from parallel_cases import gradients, whole
from torch.distributed.tensor import Replicate, Shard, distribute_tensor, init_device_mesh
from torch.distributed.tensor.debug import CommDebugMode

import kda

ROWS = ("q", "k", "v", "g", "beta")
AXES = {                                     # way to cut -> axis of each tensor that is cut
    "batch": {**dict.fromkeys(ROWS, 0), "initial_state": 0},
    "heads": {**dict.fromkeys(ROWS, 2), "initial_state": 1, "A_log": 0, "dt_bias": 0},
    "sequence": dict.fromkeys(ROWS, 1),
    "replicated": {},
}
SIZES = dict(H=2, HV=4, K=8, V=6, gate="softplus", beta="sigmoid", output_final_state=True)


def distributed(call, mesh, ways):
    def placed(name, x):
        placements = [Shard(AXES[way][name]) if name in AXES[way] else Replicate() for way in ways]
        return distribute_tensor(x.detach(), mesh, placements).requires_grad_(x.is_floating_point())

    return {name: placed(name, x) for name, x in call.tensors.items() if name != "cu_seqlens"}


def differences(mesh, ways, per_head=False):
    """Return how far outputs and gradients are from one process's, and the gradients placed otherwise than inputs."""
    sequence = "sequence" in ways
    rows = {"lengths": [150, 90], "initial_state": False} if sequence else {"B": 4, "T": 70}
    call = make(**rows, **SIZES, per_head=per_head)
    one, options = whole(call), dict(call.options)
    tensors = distributed(call, mesh, ways)
    if sequence:
        group = mesh.get_group(ways.index("sequence"))
        options["cp_context"] = kda.parallel.build_cp_context(call.tensors["cu_seqlens"], group)
    o, ht = kda.chunk_kda(**tensors, **options)
    sharded = type(call)(tensors)
    do = distribute_tensor(one.do, mesh, o.placements)
    found = {"o": (o, one.o)}
    if sequence:
        grads = gradients(sharded, o, torch.zeros_like(o), do, torch.zeros_like(o))
        again = call.requiring_grad()
        wanted = gradients(again, kda.chunk_kda(**again.arguments)[0], torch.zeros(1), one.do, torch.zeros(1))
    else:
        grads = gradients(sharded, o, ht, do, distribute_tensor(one.dht, mesh, ht.placements))
        found["ht"], wanted = (ht, one.ht), one.grads
    moved = [name for name, x in grads.items() if x.placements != tensors[name].placements]
    found |= {"d" + name: (x, wanted[name]) for name, x in grads.items()}
    return {name: (a.detach().full_tensor() - b).abs().max().item() for name, (a, b) in found.items()}, moved


def refusals(mesh, line):
    """Return the id of the check that refuses each of these calls; on `line`, of two ranks, a head cannot be split."""
    call = make(B=4, T=70, **SIZES)
    few = make(B=4, T=70, **SIZES | {"H": 1, "HV": 2})
    packed = make([70], **SIZES | {"H": 1, "HV": 2})
    by_batch, by_heads = (distributed(call, line, (way,)) for way in ("batch", "heads"))
    along = distributed(call, line, ("sequence",))
    states = distributed(make([40], **SIZES), line, ("sequence",))
    context = kda.parallel.build_cp_context(torch.tensor([0, 40]), line.get_group(0))
    channels = {"v": distribute_tensor(call.tensors["v"], line, [Shard(3)])}
    elsewhere = {"A_log": distributed(call, mesh, ("batch", "heads"))["A_log"]}
    chunk, options, with_context = kda.chunk_kda, call.options, call.options | {"cp_context": context}
    calls = {
        "a head without its value heads": (chunk, distributed(few, line, ("heads",)), options),
        "a row of a batch": (chunk, distributed(packed, line, ("batch",)), options),
        "the sequence": (chunk, along, options),
        "the sequence, of another group": (chunk, distributed(call, mesh, ("sequence", "heads")), with_context),
        "the sequence, with states": (chunk, states, with_context),
        "channels": (chunk, by_batch | channels, options),
        "q by batch, v by heads": (chunk, by_batch | {"v": by_heads["v"]}, options),
        "a plain tensor": (chunk, by_batch | {"beta": call.tensors["beta"]}, options),
        "a parameter that is a DTensor alone": (chunk, call.tensors | {"A_log": by_heads["A_log"]}, options),
        "two meshes": (chunk, by_batch | elsewhere, options),
        "explain": (kda.explain, by_batch, options),
    }
    words = {n: x for n, x in options.items() if n != "chunk_size"}
    plain = {n: x.detach() for n, x in by_batch.items()}
    o = torch.zeros(4, 70, 4, 6, dtype=torch.float64)
    outs = {
        "an out that is a plain tensor": o,
        "an out that is no tensor": [o],
        "an out that lies elsewhere": distribute_tensor(o, line, [Replicate()]),
        "an out of another shape": distribute_tensor(o[:, :1], line, [Shard(0)]),
        "an out of another dtype": distribute_tensor(o.float(), line, [Shard(0)]),
    }
    by_name = {n: x.detach() for n, x in call.tensors.items()}
    o = distribute_tensor(o, line, [Shard(0)])
    calls["an out that is a DTensor alone"] = kda.fused_recurrent_kda, by_name | {"out": o}, words
    calls["a do that is a DTensor alone"] = kda.chunk_kda_bwd, by_name | {"do": o}, options
    calls |= {name: (kda.fused_recurrent_kda, plain | {"out": x}, words) for name, x in outs.items()}
    return {name: refused(*call) for name, call in calls.items()}


def refused(function, tensors, options):
    with CommDebugMode() as watched:
        try:
            function(**tensors, **options)
            found = "nothing"
        except kda.InputError as error:
            found = error.check
        except Exception as error:
            found = f"{type(error).__name__}: {error}"
    return found + (", after communication" if watched.get_total_counts() else "")


def others(mesh):
    """Return how far the gate and the recurrence, sharded by batch and heads, are from one process."""
    call, found = make(B=4, T=10, **SIZES), {}
    tensors = distributed(call, mesh, ("batch", "heads"))
    names, options = ("g", "A_log", "dt_bias"), {n: x for n, x in call.options.items() if n != "chunk_size"}
    mine = [tensors[n] for n in names]
    one = [call.tensors[n].clone().requires_grad_() for n in names]
    a, b = kda.fused_kda_gate(*mine), kda.fused_kda_gate(*one)
    pairs = [(a, b), *zip(torch.autograd.grad(a.sum(), mine), torch.autograd.grad(b.sum(), one))]
    with torch.no_grad():
        pairs += zip(kda.fused_recurrent_kda(**tensors, **options), kda.fused_recurrent_kda(**call.tensors, **options))
        state = tensors["initial_state"].clone()
        written = kda.fused_recurrent_kda(**tensors | {"initial_state": state}, **options, inplace_final_state=True)[1]
        out = torch.zeros_like(pairs[-2][0])
        given = kda.fused_recurrent_kda(**tensors, **options, out=out)[0]
    found = {i: (x.full_tensor() - y).abs().max().item() for i, (x, y) in enumerate(pairs)}
    found["out"] = (out.full_tensor() - pairs[-2][1]).abs().max().item() + (given is not out)
    return found | {"in place": (pairs[-1][1] - state.full_tensor()).abs().max().item() + (written is not state)}


class Layer(torch.nn.Module):
    def __init__(self):
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        shapes = {"q": (16, 16), "k": (16, 16), "v": (16, 24), "g": (16, 32), "beta": (16, 4), "out": (24, 16)}
        for name, shape in shapes.items():
            weight = torch.randn(*shape, generator=generator, dtype=torch.float64) * 0.2
            self.register_parameter(name, torch.nn.Parameter(weight))
        self.A_log = torch.nn.Parameter(torch.zeros(4, dtype=torch.float64))

    def forward(self, x):
        q, k = ((x @ w).unflatten(-1, (2, 8)) for w in (self.q, self.k))
        v, g = (x @ self.v).unflatten(-1, (4, 6)), (x @ self.g).unflatten(-1, (4, 8))
        o, _ = kda.chunk_kda(
            q, k, v, g, x @ self.beta, A_log=self.A_log, use_gate_in_kernel=True, use_beta_sigmoid_in_kernel=True,
            use_qk_l2norm_in_kernel=True, chunk_size=32,
        )
        return x + o.flatten(2) @ self.out


def fully_sharded(mesh):
    """Return the losses of three steps under FSDP2, beside those of one process."""
    from torch.distributed.fsdp import fully_shard

    x = torch.randn(4, 50, 16, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    one, many = Layer(), fully_shard(Layer(), mesh=mesh)
    rank, n = mesh.get_rank(), 4 // mesh.size()
    steps = [(one, x), (many, x[rank * n:(rank + 1) * n])]
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model, _ in steps]
    losses = torch.zeros(3, 2, dtype=torch.float64)
    for i in range(3):
        for j, (model, rows) in enumerate(steps):
            loss = model(rows).square().mean()
            optimizers[j].zero_grad()
            loss.backward()
            optimizers[j].step()
            losses[i, j] = loss.detach()
    mean = losses[:, 1].clone()
    dist.all_reduce(mean)
    return (mean / mesh.size() - losses[:, 0]).abs().max().item()


def compiled(rank):
    """Return how far a call in one graph is from an eager one: o, dq and dA_log."""
    mesh, call = init_device_mesh("cpu", (2,)), make(B=2, T=40, **SIZES)
    tensors = distributed(call, mesh, ("heads",))
    found = []
    for function in (kda.chunk_kda, torch.compile(lambda **words: kda.chunk_kda(**words), fullgraph=True,
                                                  backend="aot_eager")):
        o, ht = function(**tensors, **call.options)                            # torch wants gradients of both
        found.append([o, *torch.autograd.grad(o.sum() + ht.sum(), [tensors["q"], tensors["A_log"]])])
    return [(a - b).full_tensor().abs().max().item() for a, b in zip(*found)]


def square_of_all():
    return init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))


def in_ways(rank, ways):
    square = square_of_all()
    meshes = {1: square["tp"], 2: square}
    return {name: differences(meshes[len(way)], way, "gate per head" in name) for name, way in ways.items()}


def refusals_and_others(rank):
    line_of_all, square = init_device_mesh("cpu", (4,)), square_of_all()
    return {"refused": refusals(square, square["tp"]), "others": others(square), "sharded": fully_sharded(line_of_all)}
