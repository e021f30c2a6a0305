"""offload/device/nvrtc: finding the compiler; compiling where it is there, GPU or not."""

from __future__ import annotations

import pytest

from offload._native import UpdateKind, cuda_sources
from offload.device import nvrtc
from offload.device.cuda_module import compile_kernels
from offload.device.nvrtc import Nvrtc
from offload.errors import HeteroError


def test_without_it_the_error_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nvrtc, "_names", lambda: iter(["/nowhere/libnvrtc.so"]))
    with pytest.raises(HeteroError, match=r"NVRTC, which was not found .*pip install nvidia-cuda"):
        Nvrtc.find()


def test_the_module_has_all_sources() -> None:
    sources = cuda_sources()
    for text in sources.values():
        for line in text.splitlines():
            if line.startswith("#include"):
                assert line.split()[1].strip('"<>') in sources


@pytest.fixture
def compiler() -> Nvrtc:
    try:
        return Nvrtc.find()
    except HeteroError:
        pytest.skip("needs NVRTC (pip install nvidia-cuda-nvrtc)")


@pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp16"])
def test_kernels_compile(compiler: Nvrtc, dtype: str) -> None:
    for rule in ("adam", "lion", "adagrad", "sgd", "muon", "muon_momentum"):
        assert compile_kernels(UpdateKind(dtype, dtype, rule, "bf16"), (9, 0))[:4] == b"\x7fELF"


def test_the_kernel_of_means_compiles(compiler: Nvrtc) -> None:
    assert compile_kernels(None, (9, 0))[:4] == b"\x7fELF"


def test_registers_hold_what_a_thread_works_on(compiler: Nvrtc) -> None:
    """Local memory, or loads byte by byte, would make the update many times slower."""
    sources = cuda_sources()
    source = sources.pop("update.cu")
    kind = f"-DHETERO_KIND={hash(UpdateKind('bf16', 'bf16', 'adam', 'bf16'))}"
    options = ("--gpu-architecture=sm_90", "--std=c++20", "--fmad=false", kind)
    more = "--device-as-default-execution-space"
    text = compiler.compile(source, "update", sources, (*options, more), ptx=True).decode()
    update = text[text.index(".entry hetero_update") : text.index(".entry hetero_lanes")]
    assert ".local" not in update
    assert "ld.global.v4" in update
    assert ".u8" not in update.replace("ld.param.u8", "")


def test_errors_have_the_compilers_words(compiler: Nvrtc) -> None:
    with pytest.raises(HeteroError, match=r"compiling thing for the GPU failed(.|\n)*nonsense"):
        compiler.compile("nonsense;", "thing", {}, ())
