import os

import pytest
import torch

if "PYTEST_XDIST_WORKER" in os.environ:
    torch.set_num_threads(1)  # the workers share the cores


def pytest_collection_modifyitems(config, items):
    if "exhaustive" not in (config.getoption("-m") or ""):
        for item in items:
            if "exhaustive" in item.keywords:
                item.add_marker(pytest.mark.skip(reason="takes up to an hour: -m exhaustive runs it"))
    if torch.cuda.is_available():
        return
    for item in items:
        if "gpu" in item.keywords:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))
