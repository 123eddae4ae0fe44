from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
import torch

# Read when transformers is imported: nothing here may reach for the network.
os.environ["HF_HUB_OFFLINE"] = "1"


@pytest.fixture(autouse=True)
def one_thread_without_gradients() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    with torch.inference_mode():
        yield
    torch.set_num_threads(threads)
