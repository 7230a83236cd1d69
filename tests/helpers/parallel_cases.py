"""Calls on several ranks beside the same call in one process; what each rank of a group runs, for test_parallel.py."""

import functools
import os
import sys
from types import SimpleNamespace

import torch
import torch.distributed as dist
from naive import make

import kda
from benchmarks import parallel_matrix

ROWS = ("q", "k", "v", "g", "beta")
view_of = functools.partial(parallel_matrix.view_of, device=torch.device("cpu"))

PADDED = {2: [2, 238], 3: [2, 218, 20], 4: [2, 1, 200, 37]}               # three of the 240 tokens are padding
ANY_LENGTH = {2: [0, 240], 3: [100, 0, 140], 4: [40, 17, 0, 183]}

# name -> sequences, and what is not usual.  Of 240 tokens on 2, 3 or 4 ranks the cuts lie at multiples of 120, 80, 60.
CASES = {
    "one sequence": dict(lengths=[240]),
    "packed, cut anywhere": dict(lengths=[70, 1, 0, 109, 60]),
    "sequences that end at cuts": dict(lengths=[60, 60, 0, 120]),
    "a sequence over all but the ends": dict(lengths=[7, 226, 7]),
    "value heads that share keys, states (V, K)": dict(lengths=[100, 140], HV=4, state_v_first=True),
    "gates and step sizes from logits": dict(lengths=[240], gate="softplus", beta="2*sigmoid", HV=4),
    "one gate per head": dict(lengths=[240], gate="softplus", HV=4, per_head=True),
    "a bounded gate, no initial states": dict(lengths=[33, 207], gate="bounded", beta="sigmoid", initial_state=False),
    "what is kept for the backward": dict(lengths=[170, 70], disable_recompute=True),
    "ranks of any length, some empty": dict(lengths=[33, 207], cut=ANY_LENGTH),
    "tokens of nobody behind": dict(lengths=[33, 170], tail=37, cut={2: [60, 180], 3: [70, 70, 100], 4: [60] * 4}),
    "zigzag": dict(lengths=[240], layout="zigzag"),
    **{f"ranks with padding alone, {way}": dict(lengths=[3], tail=237, exchange=way, cut=PADDED)
       for way in ("gather", "chain", "tree", "hops")},
    "zigzag, packed": dict(lengths=[40, 1, 129, 70], layout="zigzag", HV=4),
    "a chain": dict(lengths=[240], exchange="chain"),
    "a chain, packed": dict(lengths=[30, 1, 139, 70], exchange="chain", HV=4, state_v_first=True),
    "a chain, ranks of any length": dict(lengths=[33, 207], exchange="chain", cut=ANY_LENGTH),
    "a tree": dict(lengths=[240], exchange="tree"),
    "a tree, packed": dict(lengths=[30, 1, 139, 70], exchange="tree", HV=4, state_v_first=True),
    "a tree, ranks of any length": dict(lengths=[33, 207], exchange="tree", cut=ANY_LENGTH),
    "hops": dict(lengths=[240], exchange="hops"),
    "hops, packed": dict(lengths=[30, 1, 139, 70], exchange="hops", HV=4, state_v_first=True),
    "hops, ranks of any length": dict(lengths=[33, 207], exchange="hops", cut=ANY_LENGTH),
    "maps by forwards alone": dict(lengths=[70, 170], HV=4, gate="softplus", generic=True),
}
SIZES = dict(H=2, K=8, V=6, chunk_size=32, output_final_state=True)
OF_CONTEXT = ("cut", "layout", "exchange", "generic")


def called(case, **others):
    """Make a call with gates so slow that what a sequence's first tokens wrote still counts at its end."""
    words = {n: x for n, x in case.items() if n not in OF_CONTEXT}
    call = make(**SIZES | words | others)
    if call.options.get("lower_bound"):
        call.options["lower_bound"] = -0.05
    elif "A_log" in call.tensors:
        call.tensors["A_log"] -= 4
    else:
        call.tensors["g"] *= 0.02
    return call


def context_of(case, call, group):
    world = dist.get_world_size(group)
    words = {n: case[n] for n in ("layout", "exchange") if n in case}
    if "cut" in case:
        words["lengths"] = case["cut"][world]
    return kda.parallel.build_cp_context(call.tensors["cu_seqlens"], group, **words)


def gradients(call, o, ht, do, dht):
    names = [n for n, x in call.tensors.items() if x.requires_grad]
    found = torch.autograd.grad((o * do).sum() + (ht * dht).sum(), [call.tensors[n] for n in names], allow_unused=True)
    return dict(zip(names, found))


def whole(call):
    """Return what one process computes: o, final states, their gradients and all gradients that follow."""
    call = call.requiring_grad()
    o, ht = kda.chunk_kda(**call.arguments)
    generator = torch.Generator().manual_seed(1)
    do, dht = (torch.randn(x.shape, generator=generator, dtype=torch.float64).to(x.dtype) for x in (o, ht))
    return SimpleNamespace(o=o.detach(), ht=ht.detach(), do=do, dht=dht, grads=gradients(call, o, ht, do, dht))


def part_of(call, context, view):
    """Return the call as this rank makes it."""
    tensors = {}
    for name, x in call.tensors.items():
        x = x[:, view.tokens] if name in ROWS else x[view.rows] if name == "initial_state" else x
        tensors[name] = x.detach().clone().requires_grad_(x.is_floating_point())
    del tensors["cu_seqlens"]
    return SimpleNamespace(tensors=tensors, arguments=tensors | call.options | {"cp_context": context})


def differences(call, context, group, function=None):
    """Return how far each output and gradient of this rank is from one process's; parameters are summed over ranks."""
    one, view = whole(call), view_of(context, call.tensors["cu_seqlens"].tolist())
    mine = part_of(call, context, view)
    o, ht = (function or kda.chunk_kda)(**mine.arguments)
    dht = one.dht[view.rows] * view.ends.view(-1, 1, 1, 1)                     # a state at a cut is no output of one
    grads = gradients(mine, o, ht, one.do[:, view.tokens], dht)
    pairs = {"o": (o, one.o[:, view.tokens]), "ht": (ht[view.ends], one.ht[view.rows][view.ends])}
    for name, found in grads.items():
        x = one.grads[name]
        if name in ("A_log", "dt_bias"):
            dist.all_reduce(found, group=group)
        x = x[:, view.tokens] if name in ROWS else x[view.rows] if name == "initial_state" else x
        pairs["d" + name] = found, x
    if "dinitial_state" in pairs:                                              # a sequence begun elsewhere has none
        found, wanted = pairs["dinitial_state"]
        wanted = wanted.clone()
        wanted[view.begun] = 0
        pairs["dinitial_state"] = found, wanted
    return {name: (a.detach() - b).abs().max().item() if b.numel() else 0.0 for name, (a, b) in pairs.items()}


def generic(on):
    """Take the reference's own maps away."""
    from kda.routing.capability import MAPS
    from kda.routing.dispatch import capability

    object.__setattr__(capability("reference"), "maps", () if on else tuple(MAPS))


def cases_on(group, names):
    found = {}
    for name in names:
        case = CASES[name]
        call = called(case)
        generic(case.get("generic", False))
        found[name] = differences(call, context_of(case, call, group), group)
        generic(False)
    return found


def bits_on(group):
    """Return, by exchange, how far float32 that is cut on the grid of chunks is from one process."""
    world, found = dist.get_world_size(group), {}
    for exchange in ("gather", "chain", "tree", "hops"):
        call = called({"lengths": [64 * world]}, dtype=torch.float32, batch_invariant=True, HV=4, K=32, V=16)
        case = {"exchange": exchange}
        found[exchange] = differences(call, context_of(case, call, group), group)
    return found


def convolutions_on(group):
    """Compare y, dx and the gradient of the weight of a short convolution, with its halo, with one process."""
    found = {}
    world = dist.get_world_size(group)
    cuts = {2: [239, 1], 3: [100, 1, 139], 4: [1, 1, 2, 236]}
    ways = {"equal": {}, "short": {"lengths": cuts[world]}, "empty": {"lengths": [240, *[0] * (world - 1)]},
            "zigzag": {"layout": "zigzag"}}
    for name, words in ways.items():
        generator = torch.Generator().manual_seed(2)
        x, dy = torch.randn(2, 1, 240, 6, generator=generator, dtype=torch.float64).unbind()
        w = torch.randn(6, 4, generator=generator, dtype=torch.float64)
        offsets = torch.tensor([0, 2, 3, 170, 240])
        context = kda.parallel.build_cp_context(offsets, group, conv1d_kernel_size=4, **words)
        view = view_of(context, offsets.tolist())
        one = convolved(x, w, dy, offsets, lambda x: x.new_zeros(4, 3, 6))
        local = convolved(x[:, view.tokens], w, dy[:, view.tokens], context.cu_seqlens,
                         lambda x, context=context: kda.parallel.conv_halo(x, context))
        dist.all_reduce(local[2], group=group)
        wanted = one[0][:, view.tokens], one[1][:, view.tokens], one[2]
        found[name] = max((a - b).abs().max().item() for a, b in zip(local, wanted) if b.numel())
    return found


def convolved(x, w, dy, offsets, halo):
    x, w = x.clone().requires_grad_(), w.clone().requires_grad_()
    past, pieces = halo(x), [x[:, :0]]
    for n, (a, b) in enumerate(zip(offsets.tolist(), offsets.tolist()[1:])):
        row = torch.cat([past[n:n + 1], x[:, a:b]], 1).mT
        pieces.append(torch.nn.functional.conv1d(row, w.unsqueeze(1), groups=6).mT)
    y = torch.cat(pieces, 1)
    loss = (y * dy).sum() + 0 * past.sum()                                     # every rank takes part in the backward
    return y.detach(), *torch.autograd.grad(loss, (x, w), materialize_grads=True)


def layer_on(group):
    """Compare y, dx and the summed gradients of all parameters of kda.nn's layer, with a context, with one process."""
    from kda.nn import KimiDeltaAttention

    found = {}
    empty = [240, *[0] * (dist.get_world_size(group) - 1)]
    for name, words in {"contiguous": {}, "zigzag": {"layout": "zigzag"}, "empty": {"lengths": empty}}.items():
        torch.manual_seed(0)
        layer = KimiDeltaAttention(16, 2, 8, num_v_heads=4).double()           # A_log as well
        x, dy = torch.randn(2, 1, 240, 16, dtype=torch.float64).unbind()
        offsets, sums = torch.tensor([0, 70, 240]), list(layer.parameters())
        context = kda.parallel.build_cp_context(offsets, group, **words)
        tokens = view_of(context, offsets.tolist()).tokens
        one, mine = x.clone().requires_grad_(), x[:, tokens].clone().requires_grad_()
        y, z = layer(one, cu_seqlens=offsets), layer(mine, cp_context=context)
        wanted, local = (torch.autograd.grad((out * d).sum(), [*sums, given]) for out, d, given in (
            (y, dy, one), (z, dy[:, tokens], mine)))
        for each in local[:-1]:
            dist.all_reduce(each, group=group)
        pairs = [(z, y[:, tokens]), (local[-1], wanted[-1][:, tokens]), *zip(local[:-1], wanted[:-1])]
        found[name] = max((a - b).abs().max().item() for a, b in pairs if b.numel())
    return found


class Theirs:
    """What FLA's contexts hold, and no more."""

    def __init__(self, context):
        self.group, self.layout = context.group, context.layout
        self.cu_seqlens, self.cu_seqlens_cpu = context.cu_seqlens, context.cu_seqlens_cpu
        before, after = ([len(x) for x in y] for y in zip(*[(part.before, part.after) for part in context.parts]))
        past = [part.past for part in context.parts]
        zigzag = context.layout == "zigzag"
        self.pre_num_ranks, self.post_num_ranks = (None, None) if zigzag else (before[0], after[0])
        self.pre_num_conv_tokens = None if zigzag else past[0]
        self.pre_num_ranks_by_part, self.post_num_ranks_by_part = before, after
        self.pre_num_conv_tokens_by_part = past
        self.front_num_seqs = context.parts[0].last + 1
        self.conv1d_kernel_size = 4


def contexts_of_fla_on(group):
    found = {}
    for layout in ("contiguous", "zigzag"):
        case = {"lengths": [40, 1, 129, 70], "layout": layout}
        call = called(case)
        ours = context_of(case, call, group)
        context = Theirs(ours)
        found[layout] = differences(call, ours, group, lambda context=context, **words: kda.chunk_kda(
            **words | {"cp_context": context}))
        again = kda.parallel.adopt(context)
        assert again is kda.parallel.adopt(context)
        x = torch.randn(1, again.tokens, 3)
        assert torch.equal(kda.parallel.conv_halo(x, context), kda.parallel.conv_halo(x, ours, 3))
        assert kda.parallel.conv_halo(x.requires_grad_(), context, 0).shape == (ours.num_seqs, 0, 3)
    return found


def states_at_cuts_on(group):
    """Compare gradients with one process that computes piece by piece; states that leave ranks have gradients, too."""
    world, rank, found = dist.get_world_size(group), dist.get_rank(group), {}
    for exchange in ("gather", "tree", "hops"):
        case = {"lengths": [240], "exchange": exchange}
        call = called(case)
        context = context_of(case, call, group)
        one, losses = call.requiring_grad(), []
        S, n = one.tensors["initial_state"], 240 // world
        for i in range(world):
            rows = {name: one.tensors[name][:, i * n:(i + 1) * n] for name in ROWS}
            o, S = kda.chunk_kda(**rows, initial_state=S, **call.options)
            losses.append(o.square().sum() + (S * (i + 1)).sum())
        names = [*ROWS, "initial_state"]
        wanted = dict(zip(names, torch.autograd.grad(sum(losses), [one.tensors[name] for name in names])))
        mine = part_of(call, context, view_of(context, [0, 240]))
        o, S = kda.chunk_kda(**mine.arguments)
        loss = o.square().sum() + (S * (rank + 1)).sum()
        grads = dict(zip(names, torch.autograd.grad(loss, [mine.tensors[name] for name in names])))
        tokens = slice(rank * n, (rank + 1) * n)
        wanted = {name: x[:, tokens] if name in ROWS else x * (rank == 0) for name, x in wanted.items()}
        found[exchange] = max((grads[name] - wanted[name]).abs().max().item() for name in names)
    return found


def planted_on(group):
    """Return the differences of a case once a fold forgets what came before the last part."""
    from kda.parallel import maps

    fold = maps.fold
    maps.fold = lambda pieces, S: fold(pieces[-1:], S * 0)
    call = called(CASES["one sequence"])
    found = differences(call, context_of({}, call, group), group)
    maps.fold = fold
    return found


def counted_on(group):
    """Count the gathers of a forward and its backward: where a sequence crosses a cut, and where none does."""
    from kda.parallel import agreement, exchange

    count, gather = [0], exchange.gather

    def counting(*args):
        count[0] += 1
        return gather(*args)

    exchange.gather, found = counting, {}
    world = dist.get_world_size(group)
    for name, lengths in {"crossing": [240], "within ranks": [240 // world] * world}.items():
        count[0] = 0
        call = called({"lengths": lengths})
        differences(call, context_of({}, call, group), group)
        found[name] = count[0]
    exchange.gather = gather
    agreed, call = agreement.group_of(group), called({"lengths": [240]})
    context = context_of({}, call, group)
    mine = part_of(call, context, view_of(context, [0, 240]))
    x = torch.zeros(1, context.tokens, 3)
    rounds = []
    for _ in range(3):                                                         # steps of a layer with a convolution
        before = agreed.round
        kda.parallel.conv_halo(x, context, 3)
        kda.chunk_kda(**mine.arguments)
        rounds.append(agreed.round - before)
    return found | {"rounds of agreement in a third step": rounds[2]}


READING = ("__bool__", "__int__", "__float__", "__index__", "item", "tolist", "cpu", "nonzero", "numpy")


def reads_on(group):
    """Return who in kda.parallel looks into a tensor in a forward and its backward: file, method, dtype, dimensions."""
    read, methods = [], {name: getattr(torch.Tensor, name) for name in READING}

    def reading(name):
        def method(x, *args):
            caller = sys._getframe(1).f_code.co_filename
            if "/parallel/" in caller.rpartition("kda")[2]:
                read.append((os.path.basename(caller), name, x.dtype, x.dim()))
            return methods[name](x, *args)

        return method

    call = called(CASES["a sequence over all but the ends"])
    context = context_of({}, call, group)
    mine = part_of(call, context, view_of(context, call.tensors["cu_seqlens"].tolist()))
    for name in READING:
        setattr(torch.Tensor, name, reading(name))
    o, ht = kda.chunk_kda(**mine.arguments)
    (o.sum() + ht.sum()).backward()
    for name, method in methods.items():
        setattr(torch.Tensor, name, method)
    return read


def many(rank):
    """Return the differences of a sequence over nearly all of seven ranks and more, by exchange."""
    found, group = {}, dist.group.WORLD
    for exchange in ("gather", "chain", "tree", "hops"):
        case = {"lengths": [3, 274, 3], "exchange": exchange}
        call = called(case)
        found[exchange] = differences(call, context_of(case, call, group), group)
    return found


def compiled(rank):
    """Return the differences of calls in one graph, and how many graphs were made for them."""
    from torch._dynamo.utils import counters

    found, group = {}, dist.group.WORLD
    function = torch.compile(lambda **words: kda.chunk_kda(**words), fullgraph=True, backend="aot_eager")
    for name in ("packed, cut anywhere", "one sequence", "a sequence over all but the ends", "hops"):
        call = called(CASES[name])
        found[name] = differences(call, context_of(CASES[name], call, group), group, function)
    halo = torch.compile(lambda x, context: kda.parallel.conv_halo(x, context, 3), fullgraph=True, backend="aot_eager")
    context = context_of({}, called({"lengths": [240]}), group)
    x = torch.randn(1, context.tokens, 3)
    found["halo"] = {"y": (halo(x, context) - kda.parallel.conv_halo(x, context, 3)).abs().max().item()}
    return found, counters["stats"]["unique_graphs"]


def left_to_autograd(rank):
    """Return, by function, how far gradients are off if autograd alone holds a context; and how many contexts stay."""
    import gc

    from kda.nn import KimiDeltaAttention
    from kda.parallel import context as contexts

    group, before = dist.group.WORLD, len(contexts._contexts)
    call = called({"lengths": [70, 170]})
    layer = KimiDeltaAttention(8, 2, 4).double()
    context = context_of({}, call, group)
    view = view_of(context, call.tensors["cu_seqlens"].tolist())
    mine = {name: x for name, x in part_of(call, context, view).arguments.items() if name != "cp_context"}
    names = [name for name, x in mine.items() if isinstance(x, torch.Tensor) and x.is_floating_point()]
    x = torch.randn(1, context.tokens, 8, dtype=torch.float64, requires_grad=True)

    def of_function(function):
        def run(context):
            given = {name: mine[name].detach().requires_grad_() for name in names}
            return function(**mine | given | {"cp_context": context})[0], [*given.values()]
        return run

    makes = {
        "chunk_kda": of_function(kda.chunk_kda),
        "compiled": of_function(torch.compile(lambda **words: kda.chunk_kda(**words), backend="aot_eager")),
        "halo": lambda context: (kda.parallel.conv_halo(x, context, 3), [x]),
        "layer": lambda context: (layer(x, cp_context=context), [x, *layer.parameters()]),
    }
    found = {}
    for name, run in makes.items():
        y, given = run(context)
        exact = torch.autograd.grad(y.square().sum(), given)
        y, given = run(context_of({}, call, group))
        gc.collect()
        got = torch.autograd.grad(y.square().sum(), given)
        found[name] = max((a - b).abs().max().item() for a, b in zip(exact, got))
    del context, makes, run, y, given, got, exact
    torch._dynamo.reset()
    gc.collect()
    return found, len(contexts._contexts) - before


def checkpointed(rank):
    """Return the differences of a call that is made again in the backward, and of one under autocast."""
    from torch.utils.checkpoint import checkpoint

    group, found = dist.group.WORLD, {}
    call = called(CASES["packed, cut anywhere"])
    found["checkpointed"] = differences(call, context_of({}, call, group), group, lambda **words: checkpoint(
        kda.chunk_kda, use_reentrant=False, **words))
    call = called({"lengths": [70, 170]}, dtype=torch.float32)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found["autocast"] = differences(call, context_of({}, call, group), group)
    return found


def layers_with_padding_alone(rank):
    """Return how far y and dx of a layer are from one process if ranks have no sequence, by exchange and offsets."""
    from kda.nn import KimiDeltaAttention

    found, edges = {}, [0, 2, 22, 24]
    tokens = slice(edges[rank], edges[rank + 1])
    for exchange in ("gather", "chain", "tree", "hops"):
        for offsets in (torch.tensor([0, 3]), torch.tensor([0])):
            torch.manual_seed(0)
            layer, x = KimiDeltaAttention(16, 2, 8).double(), torch.randn(1, 24, 16, dtype=torch.float64)
            context = kda.parallel.build_cp_context(offsets, lengths=[2, 20, 2], exchange=exchange)
            one, mine = x.clone().requires_grad_(), x[:, tokens].clone().requires_grad_()
            y, z = layer(one, cu_seqlens=offsets), layer(mine, cp_context=context)
            for out in (y, z):
                out.square().sum().backward()
            pairs = (y[:, tokens], z), (one.grad[:, tokens], mine.grad)
            found[exchange, len(offsets)] = max((a - b).abs().max().item() for a, b in pairs)
    return found


def everything(rank, worlds):
    """Return, for each group of the first ranks, what the functions above find."""
    found = {}
    for world in worlds:
        group = dist.new_group(list(range(world)))
        if rank < world:
            found[world] = {
                "cases": cases_on(group, CASES), "bits": bits_on(group), "convolutions": convolutions_on(group),
                "contexts of FLA": contexts_of_fla_on(group), "planted": planted_on(group),
                "counted": counted_on(group), "reads": reads_on(group),
                "states at cuts": states_at_cuts_on(group), "layer": layer_on(group),
            }
    return found


def simulated(rank, backend, kept, world=2, padding=0):
    """Return how far a step of a row on several ranks is from that of one process, relative to the norm, and the
    kernels that this rank's step launches, all in the simulator.  The last rank has some padding."""
    from kda.model.force import forcing
    from kda.tools.verify.cases import make_inputs
    from ptxkit import capture

    case = make_inputs(
        lengths=(128 * world - padding,), padding=padding, H=1, K=128, V=128, gate="bounded", regime="slow")
    tensors = {name: x for name, x in case.keywords.items() if torch.is_tensor(x) and x.is_floating_point()}
    words = {name: x for name, x in case.keywords.items() if name not in tensors}
    offsets = words.pop("cu_seqlens")
    words |= {"disable_recompute": kept, "backend": backend, "output_final_state": True}
    mine = {name: x.chunk(world, 1)[rank] if name in ROWS else x for name, x in tensors.items()}
    last = rank == world - 1
    with forcing(reverse=True, halves=True), capture(arch=backend, checks=False) as session:
        one = parallel_matrix.step(tensors, case.do, case.dht, **words, cu_seqlens=offsets)
        before = len(session.launches)
        context = kda.parallel.build_cp_context(offsets, dist.group.WORLD, lengths=[128] * world)
        found = parallel_matrix.step(
            mine, case.do.chunk(world, 1)[rank], case.dht * last, **words, cp_context=context)
    for name in ("dA_log", "ddt_bias"):
        dist.all_reduce(found[name])
    wanted = {n: x.chunk(world, 1)[rank] if n == "o" or n[1:] in ROWS else x for n, x in one.items()}
    theirs = {"dinitial_state"} if rank else set()
    theirs |= set() if last else {"ht"}                                        # a state at the cut is no output of one
    apart = {n: parallel_matrix.far(x, wanted[n].double()) for n, x in found.items() if n not in theirs}
    return apart, [launch.kernel.name for launch in session.launches[before:]]
