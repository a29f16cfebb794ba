"""The files that doctor writes: each is whole or not there."""

from __future__ import annotations

import contextlib
import os
import stat
import tempfile
from pathlib import Path

from sglang_sm120.errors import ConfigError


def require_free(option: str, path: str | None, *, force: bool) -> None:
    """Before anything is measured: the name is free, and its folder may be written to.

    Args:
        option: "--report" for a file, "--record" for a folder.
        path: None where the option was not given.
        force: what is there may be overwritten.

    Raises:
        ConfigError: it is not so.
    """
    if path is None:
        return
    there = Path(path)
    try:
        if option == "--record" and there.is_dir():
            taken = not force and any(there.iterdir())
            folder = there
        else:
            taken = not force and os.path.lexists(path)
            folder = there.parent
            # Of a folder that is to be made, the nearest that is there.
            while option == "--record" and not os.path.lexists(folder) and folder != folder.parent:
                folder = folder.parent
        wrong_kind = there.exists() and there.is_dir() != (option == "--record")
    except OSError as error:
        raise _refused(option, path, error) from error
    if taken:
        raise ConfigError(f"{option} {path} is there already", "a new name", "name another, or add --force")
    if wrong_kind:
        kind = "a folder" if there.is_dir() else "no folder"
        raise ConfigError(f"{option} {path} is {kind}", f"a {'folder' if option == '--record' else 'file'}", _ANOTHER)
    if not folder.is_dir() or not os.access(folder, os.W_OK | os.X_OK):
        why = "may not be written to" if folder.is_dir() else "is not there"
        raise ConfigError(f"{option} {path}: the folder {folder} {why}", _NEEDED, _ANOTHER)


def write_file(option: str, path: Path, text: str, *, force: bool) -> None:
    """In UTF-8, and at once: until all is written, what was there before stays.

    Args:
        option: for the error.
        force: overwrite. Without it a file that came up in the meantime stays too.

    Raises:
        ConfigError: it cannot be written.
    """
    content = text.encode("utf-8", "backslashreplace")  # bytes of the environment may be no UTF-8
    try:
        target = path.resolve() if force else path  # a link is written through when asked for, never followed else
        if force and target.exists() and not stat.S_ISREG(target.stat().st_mode):
            target.write_bytes(content)  # /dev/stdout or a pipe: nothing that may be replaced
            return
        handle, temporary = tempfile.mkstemp(prefix=".doctor-", dir=target.parent)
        try:
            with os.fdopen(handle, "wb") as file:
                file.write(content)
            os.chmod(temporary, _mode(target))
            _move(temporary, target, force=force)
        finally:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(temporary)
    except (OSError, RuntimeError) as error:  # RuntimeError: a loop of links
        raise _refused(option, str(path), error) from error


_NEEDED, _ANOTHER = "a path that can be written", "name another"


def _refused(option: str, path: str, error: Exception) -> ConfigError:
    return ConfigError(f"{option} {path}: {getattr(error, 'strerror', None) or error}", _NEEDED, _ANOTHER)


def _mode(target: Path) -> int:
    """Of the file that is replaced; else what a new one gets."""
    with contextlib.suppress(OSError):
        return stat.S_IMODE(target.stat().st_mode)
    mask = os.umask(0)
    os.umask(mask)
    return 0o666 & ~mask


def _move(temporary: str, target: Path, *, force: bool) -> None:
    if not force:
        try:
            os.link(temporary, target)  # unlike a rename it refuses where something is
            return
        except FileExistsError:
            raise
        except OSError:  # a file system without hard links
            if os.path.lexists(target):
                raise FileExistsError(17, os.strerror(17)) from None
    os.replace(temporary, target)
