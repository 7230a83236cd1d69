"""Functions on several processes that are a group of gloo, for tests."""

import multiprocessing
import os
import traceback
from datetime import timedelta

import torch
import torch.distributed as dist

PRELOADED = ["torch.distributed", "torch.testing", "kda", "kda.nn", "kda.parallel", "kda.backends.reference.launch"]
DIED = 3                                     # the exit code of a rank that dies on purpose


def run(world, function, *args, timeout=60, collective_timeout=30):
    """What function(rank, *args) returns on each rank; of one that raises the traceback, of one that dies "died"."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    pipes, processes = [], []
    for rank in range(world):
        ours, theirs = context.Pipe(duplex=False)
        settings = rank, world, store.port, collective_timeout
        process = context.Process(target=_child, args=(theirs, settings, function, args), daemon=True)
        process.start()
        theirs.close()
        pipes.append(ours)
        processes.append(process)
    results = [_received(pipe, timeout) for pipe in pipes]
    for process in processes:
        process.join(5)
        process.kill()
    return results


def _received(pipe, timeout):
    if not pipe.poll(timeout):
        return "hangs"
    try:
        return pipe.recv()
    except EOFError:
        return "died"


def _child(pipe, settings, function, args):
    rank, world, port, timeout = settings
    torch.set_num_threads(1)
    try:
        store, limit = dist.TCPStore("127.0.0.1", port, is_master=False), timedelta(seconds=timeout)
        if store.add("started", 1) == world:                                  # on a busy machine some start late
            store.set("all started", "")
        store.wait(["all started"])
        store.set_timeout(limit)
        store = dist.PrefixStore("ranks", store)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=world, timeout=limit)
        result = function(rank, *args)
    except BaseException:
        result = traceback.format_exc()
    pipe.send(result)
    pipe.close()
    os._exit(0)                              # a group of which one is dead does not end
