"""Registers of things that users add in one file: by name, found without being listed anywhere."""

import difflib
import hashlib
import importlib
import importlib.util
import os
import pkgutil
import re
import sys
from collections.abc import Callable
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from types import ModuleType
from typing import Generic, TypeVar

from zoo.errors import ZooError, listed

Item = TypeVar("Item")
PLUGINS = "ZOO_PLUGINS"
"""The environment variable that names files of Python to run before names are looked up, separated as in PATH."""


class Registry(Generic[Item]):
    """Names and what they stand for.

    What registers itself is looked for, once, when a name is first asked for: in every module of ``package``, in the
    entry points ``group`` of installed packages, and in the files that ``ZOO_PLUGINS`` names. A name never makes
    anything be imported, so a stranger's checkpoint may hold any.

    Args:
        what: what a thing is called in messages, such as ``attention``.
        package: the package whose modules register themselves; None if whoever makes the register enters them.
        group: the group of entry points of other packages that do.
    """

    def __init__(self, what: str, package: str | None, group: str) -> None:
        self.what, self._package, self._group = what, package, group
        self._items: dict[str, Item] = {}
        self._is_complete = False

    def register(self, name: str) -> Callable[[Item], Item]:
        """A decorator that enters what it decorates under a name.

        Raises:
            ZooError: if the name isn't of small letters, digits and underscores, or is taken.
        """
        if not re.fullmatch(r"[a-z][a-z0-9_]*", name):
            raise ZooError(
                f"{self.what}: can't be registered as {name!r}; a name is small letters, digits and _, with a letter "
                "in front"
            )

        def enter(item: Item) -> Item:
            there = self._items.get(name)
            if there is not None and _place(there) != _place(item):
                raise ZooError(
                    f"{self.what}: {name!r} is registered already, by {_place(there)}; register {_place(item)} under "
                    "another name"
                )
            self._items[name] = item
            return item

        return enter

    def names(self) -> list[str]:
        """All names, in order."""
        self._find_all()
        return sorted(self._items)

    def get(self, name: str, argument: str | None = None) -> Item:
        """What a name stands for.

        Args:
            name: which.
            argument: what the name was given as, for the message; left out, what the register holds.

        Raises:
            ZooError: naming the nearest names, if there is none.
        """
        if not self._has(name):
            self._find_all()
        if not self._has(name):
            close = difflib.get_close_matches(str(name), self._items, n=2, cutoff=0.5)
            hint = f"do you mean {' or '.join(close)}? " if close else ""
            raise ZooError(
                f"{argument or self.what}: got {name!r}, which is none; {hint}there are {', '.join(self.names())}"
            )
        return self._items[name]

    def _has(self, name: object) -> bool:
        return isinstance(name, str) and name in self._items  # a stranger's file may hold a list where a name should be

    def _find_all(self) -> None:
        if self._is_complete:
            return
        self._is_complete = True  # what is imported now may ask for names itself
        try:
            if self._package is not None:
                package = importlib.import_module(self._package)
                for module in pkgutil.iter_modules(package.__path__, f"{self._package}."):
                    importlib.import_module(module.name)
            for entry in entry_points(group=self._group):
                try:
                    entry.load()
                except ZooError:
                    raise
                except Exception as error:
                    raise ZooError(
                        f"{self.what}: {entry.value}{_package_of(entry)} can't be loaded: {_told(error)}; mend or "
                        "uninstall that package"
                    ) from None
            for file in filter(None, os.environ.get(PLUGINS, "").split(os.pathsep)):
                load_plugin(file)
        except BaseException:
            self._is_complete = False
            raise


def load_plugin(file: str) -> ModuleType:
    """Run a file of Python that registers something, once.

    Raises:
        ZooError: if there is none, or it fails or ends the program.
    """
    path = Path(file).expanduser().resolve()
    name = f"zoo_plugin_{re.sub(r'[^0-9A-Za-z_]', '_', path.stem)}"
    if _file_of(name) not in (None, str(path)):  # two files of one name are two modules
        name += f"_{hashlib.sha256(str(path).encode()).hexdigest()[:8]}"
    if _file_of(name) == str(path):
        return sys.modules[name]
    if not path.is_file():
        raise ZooError(f"{PLUGINS}: there is no file {file}; name files of Python, separated by {os.pathsep!r}")
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise ZooError(f"{PLUGINS}: {file} is no file of Python; its name must end in .py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException as error:
        del sys.modules[name]
        if isinstance(error, (ZooError, KeyboardInterrupt)):
            raise
        raise ZooError(f"{PLUGINS}: {file} can't be run: {_told(error)}; mend it") from None
    return module


def nearest(name: str, known: list[str]) -> str:
    """What to say after an unknown name: the likeliest of those that there are, and all of them."""
    close = difflib.get_close_matches(str(name), known, n=1, cutoff=0.5)
    hint = f"do you mean {close[0]}? " if close else ""
    return f"{hint}there are {listed(known, 30)}" if known else "there are none"


def _file_of(module: str) -> str | None:
    """The file that a module was run from, None if it wasn't."""
    return getattr(sys.modules.get(module), "__file__", None)


def _package_of(entry: EntryPoint) -> str:
    return f" of {entry.dist.name}" if entry.dist else ""


def _told(error: BaseException) -> str:
    """An error of somebody else's code, in one line."""
    return f"{type(error).__name__}: {' '.join(str(error).split())}"


def _place(item: object) -> str:
    return f"{getattr(item, '__module__', '')}.{getattr(item, '__qualname__', repr(item))}"
