"""Checks of GPUs and of what connects ranks."""

from __future__ import annotations

from hetero.cli.doctor.facts import DeviceFacts
from hetero.cli.doctor.finding import Finding, note, ok, problem
from offload.memory.sizes import format_bytes


def check_devices(facts: DeviceFacts) -> Finding:
    """Whether torch sees the GPUs that there are."""
    name = "GPU"
    if facts.devices:
        each = ", ".join(f"{device} ({format_bytes(size)})" for device, size in facts.devices)
        return ok(name, f"{each}, CUDA {facts.torch_cuda}")
    if not facts.driver:
        return ok(name, "no NVIDIA driver: models compute on the CPU")
    if facts.torch_cuda is None:
        return note(
            name,
            "NVIDIA's driver is there, but this torch is built without CUDA: models compute on the"
            " CPU",
            "install a build of torch for CUDA",
        )
    if facts.hidden:
        return note(
            name,
            "NVIDIA's driver is there, and CUDA_VISIBLE_DEVICES hides its devices: models compute"
            " on the CPU",
            "unset CUDA_VISIBLE_DEVICES, if that is not meant",
        )
    return problem(
        name,
        f"NVIDIA's driver is there and torch is built for CUDA {facts.torch_cuda}, but torch sees"
        " no device",
        "nvidia-smi says what the driver sees; in a container: docker run --gpus all",
    )


def check_page_locking(facts: DeviceFacts) -> Finding:
    """Whether RAM can be page-locked, which copies to and from a GPU need to be fast."""
    name = "page-locked RAM"
    if not facts.devices:
        return ok(name, "not needed without a GPU")
    if facts.page_locking is None:
        return ok(name, "CUDA page-locks RAM for copies")
    return problem(
        name,
        f"CUDA refused to page-lock RAM: {facts.page_locking}",
        "ulimit -l unlimited (in a container: docker run --ulimit memlock=-1)",
    )


def check_collectives(facts: DeviceFacts) -> Finding:
    """What ranks can exchange shards by."""
    name = "collectives"
    if not facts.gloo:
        return problem(
            name,
            "torch.distributed has no gloo: several ranks cannot train together",
            "install a build of torch with torch.distributed",
        )
    if len(facts.devices) > 1 and not facts.nccl:
        return note(
            name,
            "gloo, no NCCL: shards of several GPUs go through RAM",
            "install a build of torch for CUDA with NCCL",
        )
    return ok(name, "gloo and NCCL" if facts.nccl else "gloo")
