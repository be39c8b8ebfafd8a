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
    """Bytes that are not the named tensors they should be: whoever made them must send others. `code` says in what."""

    def __init__(self, message: str, code: str = "tensors") -> None:
        super().__init__(message)
        self.code = code


class CoordinatorUnreachable(BlockTrainError):
    """The coordinator does not answer, or says that it cannot now: the same request may go through later, and not
    before `after_s`."""

    def __init__(self, message: str, after_s: float = 0.0) -> None:
        super().__init__(message)
        self.after_s = after_s


class GatewayUnreachable(BlockTrainError):
    """The gateway does not answer, or broke off: the same request may go through later."""


class RequestRefused(BlockTrainError):
    """The coordinator or gateway understood and said no: sending the same again cannot help. `code` names why for
    programs."""

    def __init__(self, message: str, code: str) -> None:
        super().__init__(message)
        self.code = code


class BlobError(BlockTrainError):
    """Stored bytes are missing or damaged, or the name of none was given: restore them, or have them sent again."""


class UploadError(BlockTrainError):
    """The sender of an upload must go on elsewhere: at `expected_offset`."""

    def __init__(self, message: str, expected_offset: int) -> None:
        super().__init__(message)
        self.expected_offset = expected_offset


class LedgerUnavailable(BlockTrainError):
    """The database is locked or cannot be reached: nothing was changed, and trying again may help."""


class LedgerConflict(BlockTrainError):
    """What is to be recorded contradicts what is recorded: nothing was changed, and trying again cannot help."""


class FrameError(BlockTrainError):
    """A message between stages that is none of ours, damaged or too large: whoever made it must send another."""


class StageUnreachable(BlockTrainError):
    """Blocks of the model are out of reach, or did not answer in time: the same request may go through later."""


class Overloaded(BlockTrainError):
    """More requests wait than may: the same one may go through in `retry_after_s` seconds."""

    def __init__(self, message: str, retry_after_s: float) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s
