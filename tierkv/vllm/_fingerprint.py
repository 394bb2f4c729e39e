"""Digests of what makes KV bytes interchangeable: typed fields, and files of weights. Standard library only."""

from __future__ import annotations

import dataclasses
import enum
import hashlib
import os
import re
from collections.abc import Iterable, Mapping
from typing import Any

WEIGHT_SUFFIXES = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".npz")
WHOLE_NBYTES = 64 << 20
"""A file up to this size is hashed whole; a longer one by its header, its mtime and samples."""
N_SAMPLES = 64
SAMPLE_NBYTES = 64 << 10
_MAX_HEADER_NBYTES = 100 << 20  # what the safetensors format itself allows

_ADDRESS = re.compile(r" at 0x[0-9a-f]+")


class Fingerprint:
    """A SHA-256 over named fields, each length-prefixed, so that no two records read alike."""

    def __init__(self, domain: str) -> None:
        self._hash = hashlib.sha256()
        self.add("domain", domain)

    def add(self, name: str, value: Any) -> None:
        for part in (name.encode(), canonical(value)):
            self._hash.update(len(part).to_bytes(8, "big"))
            self._hash.update(part)

    def digest(self) -> bytes:
        """32 bytes."""
        return self._hash.digest()


def canonical(value: Any) -> bytes:
    """Equal bytes for equal values, in every process: kinds are told apart, mappings and sets are sorted.

    An object that says nothing about itself counts as its type, never as its address.
    """
    parts: tuple[bytes, ...]
    match value:
        case enum.Enum():
            parts = (b"enum", type(value).__name__.encode(), value.name.encode())
        case None | bool() | int() | float():
            parts = (b"value", repr(value).encode())
        case str():
            parts = (b"str", value.encode("utf-8", "surrogatepass"))
        case bytes():
            parts = (b"bytes", value)
        case Mapping():
            parts = (b"map", *sorted(_joined((canonical(k), canonical(v))) for k, v in value.items()))
        case set() | frozenset():
            parts = (b"set", *sorted(map(canonical, value)))
        case list() | tuple():
            parts = (b"list", *map(canonical, value))
        case _ if dataclasses.is_dataclass(value) and not isinstance(value, type):
            fields = {field.name: getattr(value, field.name, None) for field in dataclasses.fields(value)}
            parts = (b"record", type(value).__name__.encode(), canonical(fields))
        case _:
            parts = (b"object", type(value).__name__.encode(), _ADDRESS.sub("", str(value)).encode())
    return _joined(parts)


def add_weights(fingerprint: Fingerprint, path: str) -> int:
    """Add every weight file below ``path`` (or the file ``path``) by its content, and return how many there are.

    The path itself does not count: a copy of the same files elsewhere gives the same digest, but for files above
    64 MiB, whose time of change counts.

    Raises:
        OSError: a file cannot be read.
    """
    files = sorted(_weight_files(path))
    for name, full in files:
        _add_file(fingerprint, name, full)
    return len(files)


def _weight_files(path: str) -> Iterable[tuple[str, str]]:
    if os.path.isfile(path):
        yield "", path
        return
    for folder, folders, names in os.walk(path):
        folders[:] = [name for name in folders if not name.startswith(".") and name != "original"]
        for name in names:
            if name.endswith(WEIGHT_SUFFIXES):
                full = os.path.join(folder, name)
                yield os.path.relpath(full, path), full


def _add_file(fingerprint: Fingerprint, name: str, path: str) -> None:
    with open(path, "rb") as file:
        status = os.fstat(file.fileno())
        fingerprint.add("file", (name, status.st_size))
        if status.st_size <= WHOLE_NBYTES:
            fingerprint.add("whole", hashlib.file_digest(file, "sha256").digest())
            return
        fingerprint.add("mtime_ns", status.st_mtime_ns)
        if path.endswith(".safetensors") or name.endswith(".safetensors"):
            n_header = int.from_bytes(file.read(8), "little")
            fingerprint.add("header", hashlib.sha256(file.read(min(n_header, _MAX_HEADER_NBYTES))).digest())
        step = (status.st_size - SAMPLE_NBYTES) / (N_SAMPLES - 1)
        samples = hashlib.sha256()
        for i in range(N_SAMPLES):
            samples.update(os.pread(file.fileno(), SAMPLE_NBYTES, int(i * step)))
        fingerprint.add("samples", samples.digest())


def _joined(parts: Iterable[bytes]) -> bytes:
    return b"".join(len(part).to_bytes(8, "big") + part for part in parts)
