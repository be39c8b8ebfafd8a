"""The ways to decode, by name. Apart from the rest, so that a command's help need not wait for torch.
Next: decode.py."""

from enum import StrEnum


class Mode(StrEnum):
    AUTOREGRESSIVE = "autoregressive"
    SPECULATIVE = "speculative"
    SWEEP = "sweep"
