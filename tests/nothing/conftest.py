import pytest
import torch


@pytest.fixture(autouse=True)
def without_a_gpu(monkeypatch):
    """These tests need nothing, and a GPU that happens to be there changes nothing."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
