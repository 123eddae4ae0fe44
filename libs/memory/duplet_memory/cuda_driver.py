"""CUDA's driver interface, called with checked results. The one place that imports bindings.

Importing this module needs no GPU and no bindings; the first call does.
"""

from __future__ import annotations

import ctypes
import functools
import importlib
import uuid
from typing import Any

from duplet_core.errors import Reason, Unavailable

_DRIVER = "cuda.bindings.driver"


class CudaError(Unavailable):
    """A driver call failed, or there is no driver. `code` is CUDA's own name of the error."""

    def __init__(self, call_name: str, code: str) -> None:
        super().__init__(Reason.TRANSFER_FAILED, f"{call_name}: {code}")
        self.call_name = call_name
        self.code = code


@functools.cache
def driver() -> Any:
    """The bindings' module.

    Raises:
        CudaError: cuda-bindings is not installed.
    """
    try:
        return importlib.import_module(_DRIVER)
    except ImportError as error:
        raise CudaError(
            "import", "cuda-bindings is not installed (pip install cuda-bindings)"
        ) from error


def call(name: str, *arguments: Any) -> Any:
    """Call one function of the driver: nothing, its result, or a tuple of several.

    Raises:
        CudaError: it returned anything but success, or there is no driver.
    """
    module = driver()
    try:
        code, *results = getattr(module, name)(*arguments)
    except RuntimeError as error:
        # What the bindings raise where libcuda or one of its functions is missing.
        raise CudaError(name, str(error)) from error
    if code != module.CUresult.CUDA_SUCCESS:
        raise CudaError(name, code.name)
    return results[0] if len(results) == 1 else tuple(results) or None


_NATIVE_VERSION = 13000
_WORD = ctypes.c_uint64
"""An address or a handle."""
_NATIVE_TYPES: dict[str, tuple[Any, ...]] = {
    "cuCtxSetCurrent": (_WORD,),
    "cuEventRecord": (_WORD, _WORD),
    "cuStreamWaitEvent": (_WORD, _WORD, ctypes.c_uint),
    "cuMemcpyHtoDAsync": (_WORD, _WORD, ctypes.c_size_t, _WORD),
    "cuMemcpyDtoDAsync": (_WORD, _WORD, ctypes.c_size_t, _WORD),
    # Destinations, sources, sizes, count; attributes, each one's first copy, their count; stream.
    "cuMemcpyBatchAsync": (*(_WORD,) * 3, ctypes.c_size_t, _WORD, _WORD, ctypes.c_size_t, _WORD),
    # Function, grid and block, shared bytes, stream, parameters, extra.
    "cuLaunchKernel": (_WORD, *(ctypes.c_uint,) * 7, _WORD, _WORD, _WORD),
}


def call_quickly(name: str, *arguments: int) -> None:
    """Call a function of the driver that only queues work, from the mover's hot path.

    Passes numbers as they are, where the bindings would make an object of each address, and
    keeps the interpreter's lock, where the bindings let go of it: beside a busy event loop each
    letting go could cost a switch interval before the next copy is queued.

    Raises:
        CudaError: it returned anything but success, or the driver is older than CUDA 13.
    """
    code = _native_function(name)(*arguments)
    if code:
        raise CudaError(name, driver().CUresult(code).name)


@functools.cache
def _native_function(name: str) -> Any:
    address, status = call("cuGetProcAddress", name.encode(), _NATIVE_VERSION, 0)
    if not address:
        raise CudaError(name, f"{status.name}: the driver is older than CUDA 13")
    return ctypes.PYFUNCTYPE(ctypes.c_int, *_NATIVE_TYPES[name])(int(address))


class Device:
    """One GPU that this process sees, with its primary context, which is torch's too.

    Owns one reference to the context, taken at first use and kept for the process's life: the
    memory, streams and events of every pool and mover live in it.
    """

    def __init__(self, ordinal: int) -> None:
        """Made by `open_devices`."""
        self.ordinal = ordinal
        self.handle = call("cuDeviceGet", ordinal)
        raw = call("cuDeviceGetUuid", self.handle).bytes
        self.uuid = f"GPU-{uuid.UUID(bytes=bytes(raw))}"
        self.name: str = call("cuDeviceGetName", 128, self.handle).split(b"\0")[0].decode()
        self._context: int | None = None

    def attribute(self, name: str) -> int:
        """One of CUdevice_attribute, named without its prefix."""
        key = getattr(driver().CUdevice_attribute, f"CU_DEVICE_ATTRIBUTE_{name}")
        return int(call("cuDeviceGetAttribute", key, self.handle))

    @property
    def capability(self) -> int:
        """Compute capability as Triton writes it: 90, 100, 120."""
        major = self.attribute("COMPUTE_CAPABILITY_MAJOR")
        return 10 * major + self.attribute("COMPUTE_CAPABILITY_MINOR")

    def use(self) -> None:
        """Make this GPU's context the calling thread's."""
        if self._context is None:
            self._context = int(call("cuDevicePrimaryCtxRetain", self.handle))
        call_quickly("cuCtxSetCurrent", self._context)

    def free_bytes(self) -> int:
        """Memory that nobody has on this GPU, over all processes."""
        self.use()
        return int(call("cuMemGetInfo")[0])

    def reaches(self, other: Device) -> bool:
        """Whether this GPU can read and write the other's memory."""
        if other.ordinal == self.ordinal:
            return True
        return bool(call("cuDeviceCanAccessPeer", self.handle, other.handle))


@functools.cache
def open_devices() -> tuple[Device, ...]:
    """Every GPU that this process sees.

    Raises:
        CudaError: no driver, or none that answers.
    """
    call("cuInit", 0)
    return tuple(Device(ordinal) for ordinal in range(call("cuDeviceGetCount")))


def find_device(device_uuid: str) -> Device:
    """The GPU with this UUID.

    Raises:
        CudaError: this process does not see it.
    """
    devices = open_devices()
    for device in devices:
        if device.uuid == device_uuid:
            return device
    seen = ", ".join(device.uuid for device in devices) or "none"
    raise CudaError("find_device", f"{device_uuid} is not visible here (seen: {seen})")
