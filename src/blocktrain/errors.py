"""What can go wrong, split by who must act. Every message names what was wrong, what was expected and the remedy.
Foreign exceptions (pydantic's, safetensors', the operating system's) are mapped to these where they come in."""

EXIT_USER_ERROR = 2


class BlockTrainError(Exception):
    """The root: the command line prints its one sentence and exits with EXIT_USER_ERROR."""


class ConfigError(BlockTrainError):
    """The user must change a setting or an argument."""


class CorpusError(BlockTrainError):
    """The user must provide other text."""


class CheckpointError(BlockTrainError):
    """A file of a model or run directory is damaged, missing or belongs to another run."""


class StorageError(BlockTrainError):
    """The disk refused: full, read-only or gone. Nothing was overwritten; trying again after making room helps."""


class TensorError(BlockTrainError):
    """Bytes that are not the named tensors they should be: whoever made them must send others."""
