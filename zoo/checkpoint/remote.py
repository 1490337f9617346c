"""Files by address: fetched once into the cache, and compared with their SHA-256 before they are used."""

import hashlib
import os
import re
import sys
import tempfile
import time
from functools import lru_cache
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlsplit
from urllib.request import url2pathname

from zoo.errors import ZooError

_SCHEME = re.compile(r"([a-z][a-z0-9+.-]*)://", re.IGNORECASE)
_PIN = re.compile(r"sha256=([0-9a-f]{64})", re.IGNORECASE)
_SECRET = re.compile(r"(?<=://)[^/\s]*@|\?\S+")  # what ``shown`` leaves out, in others' messages
_NO_ANSWER = 60  # seconds without a byte
_TICK = (
    100_000_000  # nanoseconds; file systems' clocks have steps of up to 10 ms, in which a second write can't be seen
)
Stamp = tuple[str, int, int, int, int, int]


def default_cache() -> Path:
    """``ZOO_CACHE``, or damcha-zoo in the user's cache folder."""
    base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return Path(os.environ.get("ZOO_CACHE") or base / "damcha-zoo")


def is_address(given: str) -> bool:
    """Whether it starts with a scheme, as ``https://`` or ``hf://``."""
    return _SCHEME.match(given) is not None


def stamp_of(path: str | Path) -> Stamp | None:
    """What changes when a file is written to; None if nothing is known for sure, as of one written just now."""
    try:
        found = os.stat(path)
    except OSError:
        return None
    if time.time_ns() - found.st_ctime_ns < _TICK:
        return None
    where = os.path.realpath(path)
    return where, found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns


def sha256_of(path: Path) -> str:
    """SHA-256 of a file, as hex; the file is read once for as long as it doesn't change."""
    stamp = stamp_of(path)
    return _hash(path) if stamp is None else _hash_once(path, stamp)


def _hash(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


@lru_cache(maxsize=64)
def _hash_once(path: Path, stamp: Stamp) -> str:
    return _hash(path)


def shown(address: str) -> str:
    """An address without user, password and query, which may be secrets."""
    url = urlsplit(address)
    return f"{url.scheme}://{_host(address)}{url.path}"


def place_of(address: str) -> Path:
    """Where a file is kept: files/SCHEME/HOST/PATH in the cache; of a ``file://`` address the file itself.

    Raises:
        ZooError: if the address names no file.
    """
    url = urlsplit(address)
    if url.scheme == "file":
        if url.netloc not in ("", "localhost"):
            raise ZooError(
                f"got {shown(address)}; a file's has three slashes before its absolute path", argument="address"
            )
        return Path(url2pathname(url.path))
    parts = [_host(address), *url.path.removeprefix("/").split("/")]
    if not url.path or {"", ".", ".."} & set(parts):
        raise ZooError(
            f"got {shown(address)}, which names no file; give scheme://host/path without . and ..", argument="address"
        )
    if url.query:
        parts[-1] = f"{hashlib.sha256(url.query.encode()).hexdigest()[:8]}-{parts[-1]}"
    return default_cache().joinpath("files", url.scheme, *(quote(part, safe="@ ") for part in parts))


def fetch(address: str, sha256: str | None = None, fresh: bool = False) -> Path:
    """The local copy of a file, downloaded unless the cache has it.

    Args:
        address: ``https://``, ``http://``, ``hf://user/repo/path``, ``file://``, or any other scheme of fsspec whose
            package is installed; ``#sha256=HEX`` at its end pins the file.
        sha256: what the file's SHA-256 must be, where that is known otherwise. Where neither says it, the SHA-256 is
            printed when the file is fetched, and a kept file must still have it.
        fresh: fetch anew what may have changed, as an index; a kept copy serves where that fails.

    Raises:
        ZooError: if the address can't be read, or the file is another than it must be.
    """
    address, pin = _split_pin(address)
    if pin and sha256 and pin != sha256:
        raise ZooError(f"{shown(address)} is pinned to {pin[:12]}..., but must be {sha256[:12]}...", argument="address")
    wanted = sha256 or pin
    place = place_of(address)
    if urlsplit(address).scheme == "file":
        if not place.is_file():
            raise ZooError(f"got {shown(address)}; there is no such file, so check the path", argument="address")
        if wanted is not None:
            _compare(address, sha256_of(place), wanted)
        return place
    try:
        if fresh and place.is_file():
            try:
                _download(address, place, wanted, quiet=True)
            except ZooError as error:
                _is_kept(address, place, wanted)
                print(f"{error}; using the copy of before, {place}", file=sys.stderr)
        elif not place.is_file() or not _is_kept(address, place, wanted):
            _download(address, place, wanted, quiet=fresh)
    except OSError as error:
        raise ZooError(
            f"ZOO_CACHE: {error.filename or place} can't be used ({error.strerror or error}); set ZOO_CACHE to a "
            "folder with room"
        ) from None
    return place


def _host(address: str) -> str:
    url = urlsplit(address)
    return url.netloc if url.scheme == "hf" else url.netloc.rpartition("@")[2]  # hf: user/repo@revision


def _split_pin(address: str) -> tuple[str, str | None]:
    scheme = _SCHEME.match(address)
    if scheme is None:
        raise ZooError(f"got {address!r}; must start with a scheme, as https:// or hf://", argument="address")
    bare, mark, pin = address.partition("#")
    bare = scheme[1].lower() + bare[len(scheme[1]) :]
    if not mark:
        return bare, None
    found = _PIN.fullmatch(pin)
    if found is None:
        raise ZooError(
            f"got {shown(bare)}#{pin}; what follows # must be sha256= and 64 hexadecimal digits", argument="address"
        )
    return bare, found[1].lower()


def _compare(address: str, found: str, wanted: str) -> None:
    if found != wanted:
        raise ZooError(
            f"{shown(address)} has SHA-256 {found[:12]}..., not {wanted[:12]}...; it was altered or cut "
            "short, or is another version, so take file and SHA-256 from one source",
            argument="address",
        )


def _record(place: Path) -> Path:
    return place.with_name(f".{place.name}.sha256")


def _is_kept(address: str, place: Path, wanted: str | None) -> bool:
    """Whether the kept file is the one that is wanted; an intact other version isn't.

    Raises:
        ZooError: if it was damaged in the cache.
    """
    found, record = sha256_of(place), _record(place)
    fetched = record.read_text().strip() if record.is_file() else None
    if wanted is None and fetched is None:  # put there by hand
        record.write_text(found)
        _tell(address, place, found)
        return True
    if found == (wanted or fetched):
        return True
    if found == fetched:
        return False
    raise ZooError(
        f"{shown(address)} is kept as {place}, which has SHA-256 {found[:12]}..., not "
        f"{(wanted or fetched or '')[:12]}...; it was altered or cut short, so delete it to fetch it anew",
        argument="address",
    )


def _download(address: str, place: Path, wanted: str | None, quiet: bool) -> None:
    place.parent.mkdir(parents=True, exist_ok=True)
    handle, scratch_name = tempfile.mkstemp(prefix=".fetching-", dir=place.parent)
    os.close(handle)
    scratch = Path(scratch_name)
    try:
        _read(address, scratch)
        found = sha256_of(scratch)
        if wanted is not None:
            _compare(address, found, wanted)
        scratch.chmod(0o644)
        _record(place).unlink(missing_ok=True)
        os.replace(scratch, place)
        _record(place).write_text(found)
    finally:
        scratch.unlink(missing_ok=True)
    if wanted is None and not quiet:
        _tell(address, place, found)


def _tell(address: str, place: Path, sha256: str) -> None:
    print(f"{shown(address)} is kept as {place}; to pin it, append #sha256={sha256}", file=sys.stderr)


def _read(address: str, target: Path) -> None:
    import fsspec  # here, as few runs need it
    from fsspec.callbacks import TqdmCallback

    progress = {"desc": f"Fetching {target.parent.name}", "unit": "B", "unit_scale": True}
    callback = TqdmCallback(tqdm_kwargs={**progress, "leave": False, "delay": 1, "disable": None})
    try:
        system, path = fsspec.core.url_to_fs(address, **_options(urlsplit(address).scheme))
        system.get_file(path, str(target), callback=callback)
    except Exception as error:  # every kind of file system has errors of its own
        raise ZooError(f"got {shown(address)}; {_reason(error)}", argument="address") from None
    finally:
        callback.close()


def _options(scheme: str) -> dict[str, Any]:
    if scheme not in ("http", "https"):
        return {}
    import aiohttp

    timeout = aiohttp.ClientTimeout(total=None, sock_connect=_NO_ANSWER, sock_read=_NO_ANSWER)
    return {"client_kwargs": {"timeout": timeout, "trust_env": True}}


def _reason(error: Exception) -> str:
    text = _SECRET.sub("", " ".join(str(error).split()))
    if isinstance(error, FileNotFoundError):
        return "there is no such file; check the address"
    if isinstance(error, ImportError):
        return f"this scheme needs a package more: {text}"
    if isinstance(error, ValueError) and "rotocol not known" in text:
        return "this scheme isn't known; use https://, hf:// or file://, or install a package of fsspec's for it"
    if (status := getattr(error, "status", None)) is not None:
        return f"the server answered {status}; check the address and your right to read it"
    reason = f"{type(error).__name__}: {text[:160]}" if text else type(error).__name__
    return f"it couldn't be read ({reason}); check the network, or bring the file here and give its path"
