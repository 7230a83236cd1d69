"""A group of processes on one host, with a GPU each, or a core each."""

from __future__ import annotations

import datetime
import socket

import torch
import torch.distributed as dist


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


def join(number: int, world: int, port: int, device: str, seconds: float) -> torch.device:
    """Make this process one of the group, whose ranks wait so long for each other; return its device."""
    cuda = device == "cuda"
    own_device = torch.device("cuda", number) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(own_device)
    else:
        torch.set_num_threads(1)
    store, limit = dist.TCPStore("127.0.0.1", port, world, number == 0), datetime.timedelta(seconds=seconds)
    dist.init_process_group("nccl" if cuda else "gloo", store=store, rank=number, world_size=world, timeout=limit)
    return own_device
