"""Standard output: of any encoding, on a disk that may be full, to a reader that may go."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator

from sglang_sm120.errors import ConfigError


@contextlib.contextmanager
def writing() -> Iterator[None]:
    """Around what prints. A reader that has gone, as behind `| head`, has what it wanted.

    Raises:
        ConfigError: it cannot be written, as on a full disk.
    """
    try:
        yield
        sys.stdout.flush()
    except SystemExit:
        pass  # how rich says that the reader has gone
    except OSError as error:
        # Else Python tries again at its end, and complains. A stream of a test has no file behind it.
        with contextlib.suppress(OSError, ValueError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        if not isinstance(error, BrokenPipeError):
            found = f"standard output: {error.strerror or error}"
            raise ConfigError(found, "output that can be written", "redirect it elsewhere") from error


def write(text: str) -> None:
    """A text; what the stream's encoding lacks becomes an escape. Raises: ConfigError, as `writing`."""
    encoding = getattr(sys.stdout, "encoding", None) or "utf-8"
    with writing():
        sys.stdout.write(text.encode(encoding, "backslashreplace").decode(encoding))
