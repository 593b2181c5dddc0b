"""Documents and indexes of a corpus in an object store, for sqz.ray: any store that fsspec knows and whose puts can be
conditional, such as s3://.

A task copies its documents into a folder of its own, lets sqz-index build there and publishes each index under its key,
unless another has come first. Of an index that is in the store sqz-index sees header and length, which is all that it
looks at: the bytes between are a hole.
"""

from __future__ import annotations

import json
import pathlib
import posixpath
import struct
from typing import Any

import fsspec

_SEAL = 16  # bytes of header.xxh3_128, at the end of an index
SOURCES = ("texts", "tokens", "capture")


def read_manifest(url: str) -> list[dict[str, Any]]:
    """Its entries, with the paths of their documents as URLs. ValueError names a line that is no JSON."""
    with fsspec.open(url, "r", encoding="utf-8") as manifest:
        lines = manifest.read().splitlines()
    entries = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            entry = json.loads(line)
        except json.JSONDecodeError as error:
            raise ValueError(f"{url}: line {number}: {error}") from None
        for source in SOURCES:
            given = entry.get(source)
            if isinstance(given, str):
                entry[source] = _beside(url, given)
            elif isinstance(given, list):
                entry[source] = [_beside(url, path) for path in given]
        entries.append(entry)
    return entries


def _beside(url: str, path: str) -> str:
    return path if "://" in path or path.startswith("/") else posixpath.join(posixpath.dirname(url), path)


class Stage:
    """A folder of a task: its documents under in/, their indexes under out/, of a corpus in the store at `target`."""

    def __init__(self, folder: pathlib.Path, target: str) -> None:
        self.folder, self.out, self.manifest = folder, folder / "out", folder / "corpus.jsonl"
        self._store, self._target = fsspec.core.url_to_fs(target)

    def fill(self, entries: list[dict[str, Any]]) -> None:
        """Documents, a manifest of them, and the headers of indexes that are in the store.

        A document that cannot be copied stays away, and sqz-index says so.
        """
        lines = []
        for number, entry in enumerate(entries):
            staged = dict(entry)
            for source in SOURCES:
                given = entry.get(source)
                if isinstance(given, str):
                    staged[source] = self._copy(given, number, 0)
                elif isinstance(given, list):
                    staged[source] = [self._copy(url, number, i) for i, url in enumerate(given)]
            lines.append(json.dumps(staged) + "\n")
            self._copy_header(str(entry.get("key", "")))
        self.manifest.write_text("".join(lines), encoding="utf-8")

    def publish(self, key: str, replace: bool) -> str:
        """Puts a built index under its key: "built", or "there" if the same came first.

        FileExistsError if another did.
        """
        local, remote = self.out / f"{key}.sqz", self._remote(key)
        try:
            self._store.put_file(str(local), remote, mode="overwrite" if replace else "create")
        except FileExistsError:
            header, length = self._header(remote)
            with open(local, "rb") as index:
                if length == local.stat().st_size and index.read(len(header)) == header:
                    return "there"
            raise FileExistsError(f"{remote}: another index was published meanwhile; pass --update to replace it") \
                from None
        return "built"

    def _remote(self, key: str) -> str:
        return posixpath.join(self._target, f"{key}.sqz")

    def _copy(self, url: str, number: int, part: int) -> str:
        store, path = fsspec.core.url_to_fs(url)
        local = self.folder / "in" / f"{number}.{part}" / posixpath.basename(path.rstrip("/"))
        local.parent.mkdir(parents=True, exist_ok=True)
        if store.exists(path):
            store.get(path, str(local), recursive=store.isdir(path))
        return str(local)

    def _header(self, remote: str) -> tuple[bytes, int]:
        length = int(self._store.info(remote)["size"])
        size = struct.unpack("<Q", self._store.cat_file(remote, start=0, end=8))[0] if length >= 8 else 0
        return self._store.cat_file(remote, start=0, end=min(8 + size, length)), length

    def _copy_header(self, key: str) -> None:
        remote, local = self._remote(key), self.out / f"{key}.sqz"
        if not key or ".." in key.split("/") or not self._store.exists(remote):
            return
        header, length = self._header(remote)
        local.parent.mkdir(parents=True, exist_ok=True)
        with open(local, "wb") as index:
            index.write(header)
            if length >= len(header) + _SEAL:
                index.seek(length - _SEAL)
                index.write(self._store.cat_file(remote, start=length - _SEAL, end=length))


def write_manifest(target: str, documents: list[dict[str, Any]]) -> None:
    """manifest.jsonl beside the indexes, last: key, build_id, tokens and bytes of each that is there."""
    lines = [json.dumps({name: document[name] for name in ("key", "build_id", "tokens", "bytes")}) + "\n"
             for document in sorted(documents, key=lambda document: str(document["key"]))]
    with fsspec.open(posixpath.join(target, "manifest.jsonl"), "w", encoding="utf-8") as manifest:
        manifest.write("".join(lines))
