"""Fixtures of the tests that need a GPU."""

import pytest
import torch


@pytest.fixture
def fresh_memory_is_poisoned():
    """Memory that nothing has written to holds nan."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)
