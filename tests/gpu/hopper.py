"""What tests of the Hopper backend need."""

import pytest
import torch
from on_a_gpu import DEVICE

from kda.model.host import detect

ON_HOPPER = [
    pytest.mark.gpu,
    pytest.mark.usefixtures("fresh_memory_is_poisoned"),
    pytest.mark.skipif(not torch.cuda.is_available() or detect(DEVICE).cc != (9, 0), reason="needs a Hopper GPU"),
]
