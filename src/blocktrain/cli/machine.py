"""What a command uses of this machine: its device, threads and memory, and sizes like 4GB.
Next: options.py, the options that say so."""

from __future__ import annotations

import os
import re
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from blocktrain.cli.options import require_positive
from blocktrain.errors import ConfigError

if TYPE_CHECKING:
    import torch


POWERS = ("", "k", "m", "g", "t")  # of 1000, or of 1024 with an i
LEAST_BYTES = 1e6  # of a size without a unit: below that, somebody has forgotten it
SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([kmgt]?)(i?)b?", re.IGNORECASE)


def parse_size(option: str, text: str) -> int:
    """ "4GB" -> 4,000,000,000; "4GiB" -> 4 · 2^30; "4000000" -> 4,000,000 bytes"""
    found = SIZE.fullmatch(text.strip())
    if found is None or (found[3] and not found[2]):
        raise ConfigError(f"{option} {text} is not a size: write for example 4GB, 512MB or 2GiB")
    if not found[2] and 0 < float(found[1]) < LEAST_BYTES:
        raise ConfigError(f"{option} {text} has no unit: write for example {text}GB, 512MB or 2GiB")
    size = int(float(found[1]) * (1024 if found[3] else 1000) ** POWERS.index(found[2].lower()))
    if size < 1:
        raise ConfigError(f"{option} {text} is too small: give at least 1 byte, for example 4GB")
    return size


def chosen_memory(size: str | None, device: torch.device) -> int:
    """The bytes of --memory, or else what is free on the device."""
    return free_memory_bytes(device) if size is None else parse_size("--memory", size)


def free_memory_bytes(device: torch.device) -> int:
    """Free memory of the device. For a CPU: what the system can give without swapping, or else all memory."""
    if device.type == "cuda":
        import torch

        return int(torch.cuda.mem_get_info(device)[0])
    with suppress(OSError, ValueError, IndexError):
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    with suppress(OSError, ValueError, AttributeError):  # not on every system
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    raise ConfigError("the free memory of this system is unknown: give --memory, for example 4GB")


def chosen_device(name: str | None) -> torch.device:
    """The named device, tried out; or else the GPU if there is one."""
    import torch

    if name is None:
        from blocktrain.train.trainer import pick_device

        return pick_device()
    try:
        torch.device(name)
    except RuntimeError:
        raise ConfigError(f"--device {name} is not the name of a device: give cpu, cuda, cuda:1 or mps") from None
    try:
        torch.zeros(1, device=name)
        return torch.device(name)
    except (RuntimeError, AssertionError) as error:
        detail = str(error).splitlines()[0][:100]
        raise ConfigError(
            f"--device {name} cannot be used here ({detail}): give cpu, or a device of this machine"
        ) from None


def use_threads(threads: int | None) -> None:
    require_positive("--threads", threads)
    if threads is not None:
        import torch

        torch.set_num_threads(threads)
