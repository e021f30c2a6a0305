"""offload/device/nvrtc: finding the compiler; compiling where it is there, GPU or not."""

from __future__ import annotations

import re
from ctypes import byref, c_int

import pytest

from offload._native import UpdateKind, cuda_sources
from offload.device import cuda_module, nvrtc
from offload.device.cuda_module import compile_kernels
from offload.device.nvrtc import Nvrtc
from offload.errors import HeteroError
from tests.support.native.device_tile import DTYPES, RULES, STATE_DTYPES


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
        pytest.skip("needs NVRTC, which the extra `test` brings (nvidia-cuda-nvrtc-cu12)")


def test_machine_code_is_made(compiler: Nvrtc) -> None:
    for kind in (None, UpdateKind("bf16", "bf16", "adam", "8bit")):
        assert compile_kernels(kind, (9, 0))[:4] == b"\x7fELF"


def majors(compiler: Nvrtc) -> set[int]:
    """Of the compute capabilities that it knows."""
    count = c_int()
    assert not compiler._library.nvrtcGetNumSupportedArchs(byref(count))
    numbers = (c_int * count.value)()
    assert not compiler._library.nvrtcGetSupportedArchs(numbers)
    return {number // 10 for number in numbers}


def check_arithmetic(kind: UpdateKind | None, major: int) -> None:
    """Each operation is rounded by itself, to nearest even, as the CPU's are."""
    text = compile_kernels(kind, (major, 0), ptx=True).decode()
    assert not re.search(r"\.(ftz|approx|full)\b", text)
    operations = re.findall(r"\b(add|sub|mul|mad|fma|div|sqrt|rcp)((?:\.\w+)*)\.f(?:32|64)\b", text)
    assert operations
    for name, how in operations:
        assert name != "mad"
        assert how == ".rn", f"{name}{how}"


@pytest.mark.covering(1)
@pytest.mark.parametrize("major", [9, *(pytest.param(n, marks=pytest.mark.extra) for n in (8, 10))])
@pytest.mark.parametrize("state_dtype", STATE_DTYPES)
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("grad_dtype", DTYPES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_updates_have_the_cpus_arithmetic(
    compiler: Nvrtc, dtype: str, grad_dtype: str, rule: str, state_dtype: str, major: int
) -> None:
    if major not in majors(compiler):
        pytest.skip(f"this NVRTC knows no GPU of compute capability {major}.0")
    check_arithmetic(UpdateKind(dtype, grad_dtype, rule, state_dtype), major)


def test_means_have_the_cpus_arithmetic(compiler: Nvrtc) -> None:
    check_arithmetic(None, 9)


def test_only_the_source_fuses_products(compiler: Nvrtc, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without its own, the compiler makes none: by an option, which is the same for all kinds."""
    sources = cuda_sources()
    written = "return std::fma(a, b, c);"
    assert written in sources["update/isa/vec_scalar.h"]
    text = sources["update/isa/vec_scalar.h"].replace(written, "return a * b + c;")
    monkeypatch.setattr(
        cuda_module, "cuda_sources", lambda: {**sources, "update/isa/vec_scalar.h": text}
    )
    made = compile_kernels.__wrapped__(UpdateKind("bf16", "bf16", "adam", "8bit"), (9, 0), True)
    assert b"fma." not in made


@pytest.mark.parametrize("state_dtype", ["bf16", "8bit"])
def test_registers_hold_what_a_thread_works_on(compiler: Nvrtc, state_dtype: str) -> None:
    """Local memory, or loads byte by byte, would make them many times slower."""
    text = compile_kernels(UpdateKind("bf16", "bf16", "adam", state_dtype), (9, 0), ptx=True)
    kernels = dict(re.findall(r"\.entry (\w+)((?:.|\n)*?)\n}", text.decode()))
    assert ".local" not in kernels["hetero_update"]
    assert re.search(r"ld\.global(\.nc)?\.(v4|v2)", kernels["hetero_update"])
    if state_dtype == "bf16":
        assert ".u8" not in kernels["hetero_update"].replace("ld.param.u8", "")
    assert ("shfl" in kernels["hetero_update"]) == (state_dtype == "8bit")


def test_errors_have_the_compilers_words(compiler: Nvrtc) -> None:
    with pytest.raises(HeteroError, match=r"compiling thing for the GPU failed(.|\n)*nonsense"):
        compiler.compile("nonsense;", "thing", {}, ())
