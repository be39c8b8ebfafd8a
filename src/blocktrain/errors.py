"""All exceptions of BlockTrain, divided by who must act. Every message says what is wrong, what was expected and the
remedy. Exceptions of other libraries (pydantic, safetensors, the operating system) become these where they occur."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from blocktrain.logs import SparingLog

_overlooked = SparingLog(__name__)
EXIT_USER_ERROR = 2


class BlockTrainError(Exception):
    """The base class. The command line prints its message as one line and exits with EXIT_USER_ERROR."""


class ConfigError(BlockTrainError):
    """The user must change a setting or an argument."""


class CorpusError(BlockTrainError):
    """The user must provide other text."""


class CheckpointError(BlockTrainError):
    """A file of a run directory is damaged, is missing or belongs to another run."""


class StorageError(BlockTrainError):
    """The disk is full, read-only or gone. Nothing was overwritten. The user must make room or choose another place."""


class TensorError(BlockTrainError):
    """Bytes are not the expected named tensors. The sender must send others. `code` says which check failed."""

    def __init__(self, message: str, code: str = "tensors") -> None:
        super().__init__(message)
        self.code = code


class CoordinatorUnreachable(BlockTrainError):
    """The coordinator does not answer, or cannot answer now. The same request may succeed later, not before
    `after_s` seconds. `answered`: it did answer, and the message is its own."""

    def __init__(self, message: str, after_s: float = 0.0, answered: bool = False) -> None:
        super().__init__(message)
        self.after_s, self.answered = after_s, answered


class GatewayUnreachable(BlockTrainError):
    """The gateway does not answer, or the connection broke. The same request may succeed later."""


class RequestRefused(BlockTrainError):
    """The coordinator or gateway refused the request. Sending it again cannot help. `code` is the reason. With
    "replayed", `number` is that of the last answered request: a larger one helps."""

    def __init__(self, message: str, code: str, number: int | None = None) -> None:
        super().__init__(message)
        self.code, self.number = code, number


class BlobError(BlockTrainError):
    """Stored bytes are missing or damaged, or the name is not that of any blob: restore them, or send them again."""


class UploadError(BlockTrainError):
    """The sender of an upload must continue at `expected_offset`."""

    def __init__(self, message: str, expected_offset: int) -> None:
        super().__init__(message)
        self.expected_offset = expected_offset


class LedgerUnavailable(BlockTrainError):
    """The database is locked or cannot be reached. Nothing was changed. Trying again may help."""


class LedgerConflict(BlockTrainError):
    """A new record contradicts the ledger. Nothing was changed. Trying again cannot help."""


class HubError(BlockTrainError):
    """The Hugging Face Hub does not answer or refuses. Its repository has the old model or the whole new one."""


class FrameError(BlockTrainError):
    """A message between stages is damaged, too large or not of this protocol. The sender must send another."""


class StageUnreachable(BlockTrainError):
    """A stage cannot be reached or did not answer in time. The same request may succeed later."""


class Overloaded(BlockTrainError):
    """The queue of requests is full. The same request may succeed in `retry_after_s` seconds."""

    def __init__(self, message: str, retry_after_s: float) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


@contextmanager
def foreign_bytes(refusal: Callable[[str], BlockTrainError], what: str) -> Iterator[None]:
    """Around everything that reads what a peer sent. The parsers check it and raise our errors. If they overlook
    something, the peer is refused like any other, nothing of ours ends, and the log gets a line. A lack of memory or
    disk is not the peer's fault and stays what it is."""
    try:
        yield
    except (BlockTrainError, OSError, MemoryError):
        raise
    except Exception as error:
        detail = f"{type(error).__name__}: {str(error)[:200]}".encode("utf-8", "replace").decode()
        _overlooked.warning(f"{what} cannot be read, and no check noticed it ({detail}): please report this")
        raise refusal(f"{what} cannot be read ({detail}): send what this version of blocktrain writes") from error
