"""Where errors of the operating system and of buckets become ours, with the remedy. Next: folder.py, bucket.py."""

from __future__ import annotations

import errno
import re
from collections.abc import Iterator
from contextlib import contextmanager

from obstore.exceptions import BaseError

from blocktrain.errors import StorageError

WRONG_CLOCK = "RequestTimeTooSkewed"  # what S3 answers to a request from another time
# Refused, or there are none: then obstore asks the server that cloud machines have for them.
_NO_CREDENTIALS = re.compile("40[13] (Forbidden|Unauthorized)|/latest/api/token")


@contextmanager
def storage_errors(where: str) -> Iterator[None]:
    """Raises them as StorageError."""
    try:
        yield
    except (OSError, BaseError) as error:
        raise StorageError(f"{where}: {sentence(error)}: {_remedy(error)}") from None


def sentence(error: Exception) -> str:
    """The first of the many lines of an obstore error, with the message that a bucket's XML holds."""
    text = str(getattr(error, "strerror", None) or error)
    message = re.search("<Message>(.{1,300}?)</Message>", text, re.DOTALL)
    first = text.partition("\n")[0].partition("<?xml")[0].rstrip(".: ")
    return f"{first}: {message[1].rstrip('.')}" if message else first


def _remedy(error: Exception) -> str:
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
        return "free space on that disk and try again"
    if WRONG_CLOCK in str(error):
        return "set the clock of this machine, which signs requests with its time"
    if _NO_CREDENTIALS.search(str(error)):
        return (
            "give credentials that may read, write, list and delete there in the environment (for S3 AWS_ACCESS_KEY_ID "
            "and AWS_SECRET_ACCESS_KEY)"
        )
    return "make it reachable and writable and try again"
