"""Functions on several processes that are a group of gloo, for tests."""

import multiprocessing
import os
import time
import traceback
from datetime import timedelta

import torch
import torch.distributed as dist

PRELOADED = ["torch.distributed.tensor.debug", "torch.testing", "kda", "kda.nn", "kda.parallel",
             "kda.backends.reference.launch"]
DIED = 3                                     # the exit code of a rank that dies on purpose
PATIENCE = 300                               # seconds that ranks wait for one another: a busy machine is slow


def run(world, function, *args):
    """Return each rank's function(rank, *args): the traceback if it raises, "died" if the process dies."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    pipes, processes = [], []
    for rank in range(world):
        ours, theirs = context.Pipe(duplex=False)
        process = context.Process(target=_child, args=(theirs, rank, world, store.port, function, args), daemon=True)
        process.start()
        theirs.close()
        pipes.append(ours)
        processes.append(process)
    ends = time.monotonic() + 2 * PATIENCE
    results = [_received(pipe, ends) for pipe in pipes]
    for process in processes:
        process.join(5)
        process.kill()
    return results


def _received(pipe, ends):
    if not pipe.poll(max(0, ends - time.monotonic())):
        return "hangs"
    try:
        return pipe.recv()
    except EOFError:
        return "died"


def _wait_for_all(store, event, world):
    if store.add(event, 1) == world:
        store.set(f"all {event}", "")
    store.wait([f"all {event}"])


def _child(pipe, rank, world, port, function, args):
    torch.set_num_threads(1)
    try:
        store, limit = dist.TCPStore("127.0.0.1", port, is_master=False), timedelta(seconds=PATIENCE)
        _wait_for_all(store, "started", world)                                # on a busy machine some start late
        store.set_timeout(limit)
        ranks = dist.PrefixStore("ranks", store)
        dist.init_process_group("gloo", store=ranks, rank=rank, world_size=world, timeout=limit)
        _wait_for_all(store, "connected", world)                              # before one dies on purpose
        result = function(rank, *args)
    except BaseException:
        result = traceback.format_exc()
    pipe.send(result)
    pipe.close()
    os._exit(0)                              # a group of which one is dead does not end
