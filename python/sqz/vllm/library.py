"""The indexes that requests can name."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path

import sqz
from sqz._arguments import MOST_CONTEXTS

SUFFIX = ".sqz"
_NO_TEXT = re.compile("[\0\ud800-\udfff]")  # NUL, and bytes of a file's name that are not UTF-8


@dataclass(frozen=True)
class File:
    """A version of an index's file. Another file under its name is another context."""

    path: str
    inode: int
    modified: int  # nanoseconds
    bytes: int


class Library:
    """The files of a folder by name, "acme/pump-7" for acme/pump-7.sqz, and the index of requests without a name."""

    def __init__(self, default: str, folder: str) -> None:
        """Paths of both; "" = none. ValueError if there is no such folder."""
        if folder and not os.path.isdir(folder):
            raise ValueError(f"SQZ_CONTEXTS: found {folder!r}, expected a folder of indexes")
        self.folder = os.path.realpath(folder) if folder else ""
        self.default = os.path.abspath(default) if default else ""

    def names(self) -> list[str]:
        """Lists all names, sorted, without links and without files whose names JSON cannot hold."""
        found = Path(self.folder).rglob("*" + SUFFIX) if self.folder else ()
        return sorted(str(path.relative_to(self.folder))[:-len(SUFFIX)] for path in found
                      if path.is_file() and not path.is_symlink() and not _NO_TEXT.search(str(path)))

    def first(self) -> File:
        """The default index, or another of the folder's. ValueError if there is none."""
        if self.default:
            try:
                return version_of(self.default)
            except FileNotFoundError:
                raise FileNotFoundError(f"SQZ_INDEX: found no file {self.default}") from None
        for name in self.names():
            return self.file(name)
        raise ValueError(f"SQZ_CONTEXTS: found no {SUFFIX} file in {self.folder}, expected at least one")

    def file(self, name: str) -> File:
        """The file of a name; LookupError if there is none, ValueError if the name leads out of the folder."""
        if not self.folder:
            raise ValueError(f"sqz_context: found {name!r}, expected none: the server has one index; SQZ_CONTEXTS gives "
                             "it a folder of them")
        path = os.path.normpath(os.path.join(self.folder, name + SUFFIX)) if not _NO_TEXT.search(name) else ""
        if not name or not path.startswith(self.folder + os.sep) or os.path.realpath(path) != path:
            raise ValueError(f"sqz_context: found {name!r}, expected the name of an index in the server's folder, without "
                             "..; links are not followed")
        try:
            return version_of(path)
        except OSError:
            raise LookupError(f"sqz_context: found {name!r}, which is not in the server's library; GET /v1/contexts "
                              "lists the names") from None

    def files(self, names: list[str] | None) -> list[File]:
        """Those of a request's contexts, in order. None: the default, if there is one."""
        if names is None:
            try:
                return [version_of(self.default)] if self.default else []
            except OSError:
                raise LookupError(f"sqz_context: found none, and SQZ_INDEX, {os.path.basename(self.default)}, is not "
                                  "there any more") from None
        if len(names) > MOST_CONTEXTS:
            raise ValueError(f"sqz_context: found {len(names)} names, expected at most {MOST_CONTEXTS}")
        return [self.file(name) for name in names]


def version_of(path: str) -> File:
    """OSError if there is no such file."""
    stat = os.stat(path)
    return File(path, stat.st_ino, stat.st_mtime_ns, stat.st_size)


def identity(index: sqz.Index) -> str:
    """What must be equal in all processes of an engine."""
    return f"{index.info.tokens} tokens with the hash {index.info.tokens_hash}"
