"""NVIDIA's run-time compiler, which comes with torch for CUDA: from source to a module's code."""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from ctypes import POINTER, byref, c_char_p, c_int, c_size_t, c_void_p
from pathlib import Path
from typing import Any

import torch

from offload.errors import HeteroError

_PROTOTYPES = {
    "nvrtcCreateProgram": (
        POINTER(c_void_p),
        c_char_p,
        c_char_p,
        c_int,
        POINTER(c_char_p),
        POINTER(c_char_p),
    ),
    "nvrtcCompileProgram": (c_void_p, c_int, POINTER(c_char_p)),
    "nvrtcDestroyProgram": (POINTER(c_void_p),),
    "nvrtcGetCUBINSize": (c_void_p, POINTER(c_size_t)),
    "nvrtcGetCUBIN": (c_void_p, c_char_p),
    "nvrtcGetPTXSize": (c_void_p, POINTER(c_size_t)),
    "nvrtcGetPTX": (c_void_p, c_char_p),
    "nvrtcGetProgramLogSize": (c_void_p, POINTER(c_size_t)),
    "nvrtcGetProgramLog": (c_void_p, c_char_p),
}


class Nvrtc:
    """The compiler."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self._library = library
        library.nvrtcGetErrorString.argtypes = (c_int,)
        library.nvrtcGetErrorString.restype = c_char_p

    @classmethod
    def find(cls) -> Nvrtc:
        """The one that torch brings, or the system's. Raises HeteroError if there is none."""
        tried = []
        for name in _names():
            try:
                # It opens this one by its bare name, which works for what is loaded already.
                for builtins in sorted(Path(name).parent.glob("libnvrtc-builtins.so*")):
                    ctypes.CDLL(str(builtins))
                return cls(load_library(name, _PROTOTYPES))
            except OSError as error:
                tried.append(str(error))
        # (The package of CUDA 13 has no number.)
        package = "nvidia-cuda-nvrtc"
        if (torch.version.cuda or "").startswith("12."):
            package += "-cu12"
        raise HeteroError(
            f"updates on the GPU are compiled by NVRTC, which was not found "
            f"({'; '.join(tried)}); install it (pip install {package}), or add the "
            f"directory of libnvrtc.so to LD_LIBRARY_PATH"
        )

    def compile(
        self,
        source: str,
        name: str,
        headers: Mapping[str, str],
        options: Sequence[str],
        ptx: bool = False,
    ) -> bytes:
        """Machine code (with `ptx` its text) of `source`, which may include `headers` by name.

        Raises HeteroError with the compiler's messages.
        """
        program = c_void_p()
        texts, names = _strings(headers.values()), _strings(headers)
        created = self._library.nvrtcCreateProgram(
            byref(program), source.encode(), name.encode(), len(headers), texts, names
        )
        self._check(created, name)
        try:
            failure = self._library.nvrtcCompileProgram(program, len(options), _strings(options))
            if failure:
                log = self._text(program, "nvrtcGetProgramLog").decode(errors="replace")
                raise HeteroError(
                    f"compiling {name} for the GPU failed ({self._words(failure)}, options "
                    f"{' '.join(options)}):\n{log}"
                )
            return self._text(program, "nvrtcGetPTX" if ptx else "nvrtcGetCUBIN")
        finally:
            self._library.nvrtcDestroyProgram(byref(program))

    def _text(self, program: c_void_p, getter: str) -> bytes:
        size = c_size_t()
        self._check(getattr(self._library, f"{getter}Size")(program, byref(size)), getter)
        content = ctypes.create_string_buffer(size.value)
        self._check(getattr(self._library, getter)(program, content), getter)
        return content.raw

    def _check(self, result: int, what: str) -> None:
        if result:
            raise HeteroError(f"NVRTC failed at {what}: {self._words(result)}")

    def _words(self, result: int) -> str:
        text = self._library.nvrtcGetErrorString(result)
        return text.decode() if text else f"error {result}"


def load_library(name: str, prototypes: Mapping[str, Sequence[Any]]) -> ctypes.CDLL:
    """A library whose functions of `prototypes` return error codes. Raises OSError."""
    library = ctypes.CDLL(name)
    for function_name, arguments in prototypes.items():
        function = getattr(library, function_name)
        function.argtypes, function.restype = arguments, c_int
    return library


def _names() -> Iterator[str]:
    """Of the library: one that torch has loaded goes by its bare name."""
    major = (torch.version.cuda or "").split(".")[0]
    if major:
        yield f"libnvrtc.so.{major}"
    for directory in sys.path:
        for path in sorted(Path(directory or ".").glob(f"nvidia/*/lib/libnvrtc.so.{major}*")):
            yield str(path)
    yield "libnvrtc.so"
    yield "/usr/local/cuda/lib64/libnvrtc.so"


def _strings(texts: Iterable[str]) -> ctypes.Array[c_char_p]:
    encoded = [text.encode() for text in texts]
    return (c_char_p * len(encoded))(*encoded)
