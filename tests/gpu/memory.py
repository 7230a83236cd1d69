"""Tests that want much of the GPU's memory."""

import pytest
import torch


def needs(gibibytes):
    torch.cuda.empty_cache()
    if torch.cuda.mem_get_info()[0] < gibibytes << 30:
        pytest.skip(f"needs {gibibytes} GiB of free GPU memory")
