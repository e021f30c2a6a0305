"""offload/device/cuda_module: what becomes of contexts and modules, with a driver of the test's."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from typing import Any

import pytest

from offload._native import UpdateKind
from offload.device import cuda_module
from offload.errors import HeteroError
from tests.support.native.fake_cuda import FakeRuntime

KIND = UpdateKind("bf16", "bf16", "adam", "bf16")


class Driver:
    """Contexts of one thread, and what was loaded; every call succeeds but `failing`."""

    PRIMARY = 77

    def __init__(self) -> None:
        self.contexts = [1]  # of another device, which the thread had selected
        self.retained = 0
        self.loaded = 0
        self.launched: list[int] = []  # the current context of each launch
        self.failing: str | None = None

    def __getattr__(self, name: str) -> Any:
        if name.startswith("do_"):
            raise AttributeError(name)

        def call(*arguments: Any) -> int:
            if name == self.failing:
                return 1
            getattr(self, f"do_{name}", lambda *_: None)(*arguments)
            return 0

        return call

    def do_cuDevicePrimaryCtxRetain(self, context: Any, index: int) -> None:
        self.retained += 1
        context._obj.value = self.PRIMARY

    def do_cuDeviceGetPCIBusId(self, name: Any, length: int, index: int) -> None:
        name.value = f"0000:3B:0{index}.0".encode()
        assert len(name) == length

    def do_cuCtxPushCurrent_v2(self, context: Any) -> None:
        self.contexts.append(context.value)

    def do_cuCtxPopCurrent_v2(self, context: Any) -> None:
        self.contexts.pop()

    def do_cuModuleLoadData(self, module: Any, code: bytes) -> None:
        self.loaded += 1
        module._obj.value = 5

    def do_cuModuleUnload(self, module: Any) -> None:
        assert self.contexts[-1] == self.PRIMARY
        self.loaded -= 1

    def do_cuLaunchKernel(self, *arguments: Any) -> None:
        self.launched.append(self.contexts[-1])


class Stream:
    cuda_stream = 9


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Iterator[Driver]:
    made = Driver()
    cuda_module.primary_context.cache_clear()
    monkeypatch.setattr(cuda_module, "_driver", lambda: made)
    monkeypatch.setattr(cuda_module, "compile_kernels", lambda kind, capability: b"code")
    monkeypatch.setattr(cuda_module.torch.cuda, "get_device_capability", lambda index: (9, 0))
    yield made
    cuda_module.primary_context.cache_clear()


def test_the_thread_s_device_stays_current(driver: Driver) -> None:
    module = cuda_module.CudaModule(KIND, 1)
    assert driver.contexts == [1]
    module.launch("hetero_update", 1, [], Stream)
    assert driver.launched == [Driver.PRIMARY]
    assert driver.contexts == [1]
    driver.failing = "cuLaunchKernel"
    with pytest.raises(HeteroError, match="launching hetero_update"):
        module.launch("hetero_update", 1, [], Stream)
    assert driver.contexts == [1]


def test_closing_gives_the_module_back(driver: Driver) -> None:
    module = cuda_module.CudaModule(KIND, 1)
    assert driver.loaded == 1
    for _ in range(2):
        module.close()
        assert driver.loaded == 0
    assert driver.contexts == [1]


def test_what_cannot_be_loaded_holds_nothing(driver: Driver) -> None:
    driver.failing = "cuModuleLoadData"
    with pytest.raises(HeteroError, match="loading kernels"):
        cuda_module.CudaModule(KIND, 1)
    assert driver.contexts == [1]


def test_a_device_has_a_name_on_its_bus_and_a_context(driver: Driver) -> None:
    cuda_module.pci_device.cache_clear()
    assert cuda_module.pci_device(1) == "0000:3B:01.0"
    assert cuda_module.primary_context(1) == Driver.PRIMARY
    assert cuda_module.primary_context(1) == Driver.PRIMARY
    assert driver.retained == 1
    driver.failing = "cuDeviceGetPCIBusId"
    with pytest.raises(HeteroError, match="PCI address"):
        cuda_module.pci_device(0)
    cuda_module.pci_device.cache_clear()


def test_native_code_gets_the_addresses_of_functions(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda_module, "_driver", lambda: ctypes.CDLL(None))
    found = cuda_module.driver_functions(["malloc", "free"])
    assert sorted(found) == ["free", "malloc"]
    assert 0 not in found.values()
    # The fake has those that native code asks for.
    assert set(cuda_module.COPY_FUNCTIONS) == set(FakeRuntime().driver.functions)
