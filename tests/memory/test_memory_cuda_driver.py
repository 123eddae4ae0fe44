"""Calls that go past the bindings: arguments arrive whole, and codes become errors."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from typing import Any

import pytest

from duplet_memory import cuda_driver
from duplet_memory.cuda_driver import CudaError, call, call_quickly

Recorded = list[tuple[int, ...]]


@pytest.fixture
def batch_calls(monkeypatch: pytest.MonkeyPatch) -> Iterator[Recorded]:
    """The driver's cuMemcpyBatchAsync, played by a callback that records what it gets. Its
    fifth call and later ones fail."""
    recorded: Recorded = []
    word = ctypes.c_uint64

    def take(*arguments: int) -> int:
        recorded.append(arguments)
        return 0 if len(recorded) < 5 else 1

    callback = ctypes.CFUNCTYPE(ctypes.c_int, *(word,) * 8)(take)
    address = ctypes.cast(callback, ctypes.c_void_p).value

    def fake(name: str, *arguments: Any) -> Any:
        assert (name, arguments) == ("cuGetProcAddress", (b"cuMemcpyBatchAsync", 13000, 0))
        return address, None

    monkeypatch.setattr(cuda_driver, "call", fake)
    cuda_driver._native_function.cache_clear()
    yield recorded
    cuda_driver._native_function.cache_clear()


def test_addresses_beyond_32_bits_arrive(batch_calls: Recorded) -> None:
    arguments = (0x7F00_1234_5678, 2**40, 2**63 + 8, 32, 5, 6, 1, 2**47)
    call_quickly("cuMemcpyBatchAsync", *arguments)
    assert batch_calls == [arguments]


def test_a_code_becomes_an_error_with_cudas_name(batch_calls: Recorded) -> None:
    for _ in range(4):
        call_quickly("cuMemcpyBatchAsync", *range(8))
    with pytest.raises(CudaError, match="cuMemcpyBatchAsync: CUDA_ERROR_INVALID_VALUE"):
        call_quickly("cuMemcpyBatchAsync", *range(8))


def test_a_wrong_number_of_arguments_is_our_bug(batch_calls: Recorded) -> None:
    with pytest.raises(TypeError):
        call_quickly("cuMemcpyBatchAsync", 1, 2)
    assert not batch_calls


def test_what_the_bindings_raise_without_a_driver_is_a_typed_error(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Bindings:
        def cuInit(self, flags: int) -> None:
            raise RuntimeError("Failed to dlopen libcuda.so.1")

    monkeypatch.setattr(cuda_driver, "driver", Bindings)
    with pytest.raises(CudaError, match="cuInit: Failed to dlopen") as caught:
        call("cuInit", 0)
    assert caught.value.call_name == "cuInit"
