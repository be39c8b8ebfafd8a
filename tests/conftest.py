"""What all tests share: hypothesis draws the same examples on every machine and does not time them; torch computes with
one thread, in child processes too, since two on a busy machine wait for each other longer than tiny models take."""

import os

from hypothesis import settings

os.environ["OMP_NUM_THREADS"] = "1"  # before anything imports torch
settings.register_profile("house", deadline=None, derandomize=True, max_examples=50)
settings.load_profile("house")
