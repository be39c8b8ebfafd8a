"""How a process keeps the memory that it frees: counted in pages that the system had to clear."""

from __future__ import annotations

import subprocess
import sys

FAULTS = """
import resource
from blocktrain.io import allocator

for settings in ({allocator._MMAP_THRESHOLD: 2**17, allocator._TRIM_THRESHOLD: 2**17}, None):
    allocator._set(settings) if settings else allocator.keep_some_memory()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(20):
        pieces = [bytearray(2**21) for _ in range(8)]
        del pieces
    print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


def test_a_stage_uses_the_memory_of_the_traversal_before_again():
    done = subprocess.run([sys.executable, "-c", FAULTS], capture_output=True, text=True, check=True)
    returned, kept = map(int, done.stdout.split())
    assert kept < returned / 5
