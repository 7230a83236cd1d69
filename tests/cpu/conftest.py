import pytest
import torch


@pytest.fixture(autouse=True, scope="module")
def without_a_gpu():
    """These tests need nothing, and a GPU that happens to be there changes nothing."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.cuda, "is_available", lambda: False)
        yield


@pytest.fixture(autouse=True, scope="module")
def one_thread():
    """The tensors are small, and other tests run beside these."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
