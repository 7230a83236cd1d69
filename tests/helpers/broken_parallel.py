"""Broken calls on several ranks, each in one process: a group of one, two ranks that share a store, or one of fakes."""

import contextlib
import threading

import torch
import torch.distributed as dist
from naive import make

import kda
from kda.parallel.agreement import Agreement, Ask

SIZES = dict(H=2, HV=4, K=5, V=3, dtype=torch.float32)


@contextlib.contextmanager
def alone():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield dist.group.WORLD
    finally:
        dist.destroy_process_group()


def building(*offsets, **words):
    with alone():
        return kda.parallel.build_cp_context(torch.tensor(offsets), **words)


def calling(lengths, function=None, T=None, **words):
    """Call with the tokens of `lengths`, and with a context of T tokens."""
    with alone() as group:
        context = kda.parallel.build_cp_context(torch.tensor([0, T or sum(lengths)]), group, **words)
        return (function or _chunk)(make(lengths, **SIZES), context)


def _chunk(call, context):
    return kda.chunk_kda(**call.arguments, cp_context=context)


def in_another_world():
    with alone() as group:
        context = kda.parallel.build_cp_context(torch.tensor([0, 8]), group)
    return _chunk(make([8], **SIZES), context)


def of_another_world():
    """Call with a context of FLA's that speaks of more ranks than there are."""

    class Theirs:
        cu_seqlens = cu_seqlens_cpu = torch.tensor([0, 8])
        pre_num_ranks, post_num_ranks, layout = 3, 0, "contiguous"

    with alone() as group:
        Theirs.group = group
        return _chunk(make([8], **SIZES), Theirs())


def disagreeing():
    store, ask = dist.HashStore(), Ask("chunk_kda", "cp_context", "cp_context.agreed", 5.0)
    groups = [Agreement(dist.PrefixStore("two", store), rank, 2) for rank in range(2)]

    def other():
        with contextlib.suppress(kda.InputError):
            groups[1].agree("maps of HV=8 K=128 V=128 in torch.float32", ask)

    thread = threading.Thread(target=other)
    thread.start()
    try:
        groups[0].agree("maps of HV=4 K=128 V=128 in torch.float32", ask)
    finally:
        thread.join()


def halo(*shape, rows=None):
    with alone() as group:
        context = kda.parallel.build_cp_context(torch.tensor([0, 8]), group)
        return kda.parallel.conv_halo(torch.zeros(shape) if shape else [1.0], context, rows)


def meshed(axis, sizes=None, world=2, **replaced):
    """Call with DTensors whose rows are sharded along an axis of a mesh of fake ranks."""
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor, init_device_mesh
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=world)
    try:
        mesh = init_device_mesh("cpu", (world,), mesh_dim_names=("tp",))
        call = make(**{"B": 2, "T": 8, "initial_state": False} | SIZES | (sizes or {}))
        where = [Replicate() if axis is None else Shard(axis)]
        tensors = {n: distribute_tensor(x, mesh, where) for n, x in call.tensors.items()}
        for name, axis in replaced.items():
            x = call.tensors[name]
            tensors[name] = x if axis == "plain" else distribute_tensor(x, mesh, [Shard(axis)])
        function = kda.explain if sizes == {} else kda.chunk_kda
        return function(**tensors, **call.options)
    finally:
        dist.destroy_process_group()


def along_the_sequence(own_group, lengths=(8,), **words):
    """Run with a context, of the mesh's group or another one."""
    from torch.distributed.tensor import Shard, distribute_tensor, init_device_mesh

    with alone():
        mesh = init_device_mesh("cpu", (1,), mesh_dim_names=("cp",))
        group = mesh.get_group(0) if own_group else dist.new_group([0])
        call = make(list(lengths), **SIZES | words)
        context = kda.parallel.build_cp_context(call.tensors.pop("cu_seqlens"), group)
        tensors = {n: distribute_tensor(x, mesh, [Shard(1)]) for n, x in call.tensors.items()}
        return kda.chunk_kda(**tensors, **call.options, cp_context=context)


def two_meshes():
    from torch.distributed.tensor import Replicate, distribute_tensor, init_device_mesh

    with alone():
        one, two = init_device_mesh("cpu", (1,)), init_device_mesh("cpu", (1, 1))
        call = make(B=1, T=8, **SIZES)
        tensors = {n: distribute_tensor(x, one, [Replicate()]) for n, x in call.tensors.items()}
        tensors["beta"] = distribute_tensor(call.tensors["beta"], two, [Replicate()] * 2)
        return kda.chunk_kda(**tensors, **call.options)


def gate_on_a_mesh(A_log):
    from torch.distributed.tensor import Shard, distribute_tensor, init_device_mesh

    with alone():
        mesh = init_device_mesh("cpu", (1,))
        return kda.fused_kda_gate(distribute_tensor(torch.zeros(1, 8, 2, 5), mesh, [Shard(2)]), A_log)


def pooled():
    from torch.distributed.tensor import Shard, distribute_tensor, init_device_mesh

    with alone(), torch.no_grad():
        mesh = init_device_mesh("cpu", (1,))
        call = make(B=1, T=8, chunk_size=None, **SIZES)
        tensors = {n: distribute_tensor(x, mesh, [Shard(0)]) for n, x in call.tensors.items()}
        return kda.fused_recurrent_kda(**tensors, **call.options, ssm_state_indices=torch.tensor([0]))


def context_and_pool():
    with torch.no_grad():
        return calling([8], lambda call, context: kda.chunk_kda(
            **call.arguments, cp_context=context, ssm_state_indices=torch.tensor([0])))


CASES = {
    "cp_context.type": lambda: kda.chunk_kda(**make([8], **SIZES).arguments, cp_context=object()),
    "cp_context.world": in_another_world,
    "cp_context.tokens": lambda: calling([8], T=16),
    "cp_context.agreed": disagreeing,
    "cp_context.pool": context_and_pool,
    "cp_group.missing": lambda: kda.parallel.build_cp_context(torch.tensor([0, 8])),
    "cp_group.type": lambda: building(0, 8, group="world"),
    "cp_layout.value": lambda: building(0, 8, layout="striped"),
    "cp_exchange.value": lambda: building(0, 8, layout="zigzag", exchange="hops"),
    "cp_conv.value": lambda: building(0, 8, conv1d_kernel_size=0),
    "cp_timeout.value": lambda: building(0, 8, timeout=0),
    "cp_offsets.type": lambda: building([0, 8]),
    "cp_offsets.values": lambda: building(0, 5, 9, lengths=[8]),
    "cp_offsets.differs": lambda: building(0, 8, cu_seqlens_cpu=torch.tensor([0, 4, 8])),
    "cp_offsets.parts": lambda: building(0, 9, layout="zigzag"),
    "cp_lengths.value": lambda: building(0, 8, lengths=[4, 4]),
    "halo.type": lambda: halo(rows=2),
    "halo.rows": lambda: halo(1, 8, 3),
    "halo.shape": lambda: halo(1, 9, 3, rows=2),
    "mesh.op": lambda: meshed(0, sizes={}),
    "mesh.plain": lambda: meshed(0, beta="plain"),
    "mesh.same": two_meshes,
    "mesh.way": lambda: meshed(0, v=3),
    "mesh.placement": lambda: meshed(2, beta=0),
    "mesh.even": lambda: meshed(2, sizes={"H": 1, "HV": 2}),
    "mesh.pool": pooled,
    "mesh.sequence": lambda: meshed(1),
    "mesh.group": lambda: along_the_sequence(False, initial_state=False),
    "mesh.states": lambda: along_the_sequence(True),
}
