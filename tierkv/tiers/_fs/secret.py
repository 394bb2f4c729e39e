"""Where the secret of a keyed checksum comes from: a file, or a variable of the environment.

Only its place is ever written down, shown or logged; what is read goes into :class:`~tierkv.tiers._fs.format.Sums`.
"""

from __future__ import annotations

import logging
import os
import stat
from dataclasses import dataclass
from typing import Final

from tierkv.errors import bad_setting
from tierkv.tiers._fs.format import PLAIN, Sums

_log = logging.getLogger(__name__)

LEAST_NBYTES: Final = 16
MOST_NBYTES: Final = 4096
_LENGTH: Final = f"{LEAST_NBYTES} to {MOST_NBYTES} bytes, line ends at its end not counted"


@dataclass(frozen=True, slots=True)
class SecretSource:
    """The place of a secret: one of the two, or none.

    Attributes:
        file: path of a regular file.
        env: name of a variable.
    """

    file: str | None = None
    env: str | None = None

    def read(self, file_option: str, env_option: str) -> Sums:
        """Read it. The names of the two settings are for messages, which say where it was looked for and no more.

        Raises:
            ConfigError: both are given, it is not there, may not be read, or is too short or too long.
        """
        if self.file is not None and self.env is not None:
            raise bad_setting(env_option, self.env, f"left out beside {file_option}")
        if self.file is not None:
            return Sums(_checked(file_option, self.file, _in_file(file_option, self.file)))
        if self.env is not None:
            secret = os.environb.get(os.fsencode(self.env))
            if secret is None:
                raise bad_setting(env_option, self.env, "the name of a variable that is set in this process")
            return Sums(_checked(env_option, self.env, secret))
        return PLAIN


def _checked(option: str, place: str, secret: bytes) -> bytes:
    secret = secret.rstrip(b"\r\n")
    if not LEAST_NBYTES <= len(secret) <= MOST_NBYTES:
        raise bad_setting(option, place, f"the place of a secret of {_LENGTH}")
    return secret


def _in_file(option: str, path: str) -> bytes:
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        try:
            found = os.fstat(fd)
            secret = os.read(fd, MOST_NBYTES + 3) if stat.S_ISREG(found.st_mode) else b""
        finally:
            os.close(fd)
    except OSError as error:
        raise bad_setting(option, path, f"a file that can be read ({error.strerror})") from None
    mode = stat.S_IMODE(found.st_mode)
    if mode & 0o077:
        _log.warning("%s: others may read the checksum key in %s, which has mode %o; chmod 600", option, path, mode)
    return secret
