"""Registers: what a name may be, where things are found, and that a name alone never makes anything run."""

import os
import sys
import types
from importlib.metadata import entry_points

import pytest

from zoo.errors import ZooError
from zoo.registry import PLUGINS, Registry, nearest

HOME = "shop_of_tests"


class Apple: ...


class Pear: ...


@pytest.fixture
def shop(tmp_path, monkeypatch):
    """A register with a package of its own, which has one module and counts how often that is run."""
    package = tmp_path / HOME
    package.mkdir()
    (package / "__init__.py").write_text("", encoding="utf-8")
    (package / "fruit.py").write_text(
        f"import {HOME}\n{HOME}.runs = getattr({HOME}, 'runs', 0) + 1\n"
        "class Plum: ...\n"
        f"{HOME}.register('plum')(Plum)\n",
        encoding="utf-8",
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delenv(PLUGINS, raising=False)
    register = Registry("fruit", HOME, f"{HOME}.fruit")
    __import__(HOME)
    sys.modules[HOME].register = register.register
    yield register
    for name in [name for name in sys.modules if name.startswith((HOME, "zoo_plugin_shop"))]:
        del sys.modules[name]


@pytest.fixture
def plugins(tmp_path, monkeypatch):
    """Write files of Python and name them all in the environment variable."""

    def write(**texts):
        files = [tmp_path / f"shop_{name}.py" for name in texts]
        for file, text in zip(files, texts.values(), strict=True):
            file.parent.mkdir(exist_ok=True)
            file.write_text(text, encoding="utf-8")
        monkeypatch.setenv(PLUGINS, os.pathsep.join(map(str, files)))
        return files

    return write


CHERRY = f"import {HOME}\nclass Cherry: ...\n{HOME}.register('cherry')(Cherry)\n"


# ---------------------------------------------------------------------- names


def test_names_come_in_order_and_stand_for_what_was_registered(shop):
    assert shop.register("pear")(Pear) is Pear
    shop.register("apple")(Apple)
    assert shop.names() == ["apple", "pear", "plum"]
    assert shop.get("apple") is Apple


@pytest.mark.parametrize("name", ["", "Apple", "1apple", "_apple", "an apple", "an-apple", "apple\n", "äpfel", "a.b"])
def test_a_name_is_small_letters_digits_and_underscores(shop, name):
    with pytest.raises(ZooError, match=r"fruit: can't be registered as .*; a name is small letters"):
        shop.register(name)


def test_a_name_is_taken_once(shop):
    shop.register("apple")(Apple)
    with pytest.raises(ZooError, match=r"fruit: 'apple' is registered already, by .*\.Apple; register .*\.Pear under"):
        shop.register("apple")(Pear)
    assert shop.get("apple") is Apple


def test_a_module_that_is_run_again_takes_its_name_again(shop):
    shop.register("apple")(Apple)
    again = type("Apple", (), {"__module__": Apple.__module__, "__qualname__": Apple.__qualname__})
    shop.register("apple")(again)
    assert shop.get("apple") is again


def test_an_unknown_name_is_told_the_nearest_and_all(shop):
    shop._is_complete = True
    shop.register("apple")(Apple)
    shop.register("zucchini")(Pear)
    with pytest.raises(
        ZooError, match=r"^fruit: got 'aple', which is none; do you mean apple\? there are apple, zucchini$"
    ):
        shop.get("aple")
    with pytest.raises(ZooError, match=r"^snack: got 'xyz', which is none; there are"):
        shop.get("xyz", "snack")


def test_nearest_of_nothing_says_so():
    assert nearest("apple", []) == "there are none"
    assert nearest("aple", ["pear", "apple"]).startswith("do you mean apple? there are ")


@pytest.mark.parametrize("name", [None, 3, ["apple"], {"apple": 1}, b"apple"])
def test_what_is_no_name_is_none(shop, name):
    with pytest.raises(ZooError, match=r"fruit: got .*, which is none"):
        shop.get(name)


# ---------------------------------------------------------------------- where things are found


def test_modules_of_the_package_are_run_once_and_only_when_asked(shop):
    assert not hasattr(sys.modules[HOME], "runs")
    shop.register("apple")(Apple)
    assert shop.get("apple") is Apple  # known already: nothing is looked for
    assert not hasattr(sys.modules[HOME], "runs")
    shop.names()
    shop.names()
    assert sys.modules[HOME].runs == 1


def test_a_register_without_a_package_looks_into_none(monkeypatch):
    monkeypatch.delenv(PLUGINS, raising=False)
    register = Registry("fruit", None, "no.such.group")
    register.register("apple")(Apple)
    assert register.names() == ["apple"]


@pytest.mark.parametrize(
    "name", ["colorsys", "shop_of_tests.fruit", "../plum", "/etc/passwd", "zoo_plugin_x", "__init__"]
)
def test_a_name_never_makes_anything_be_imported(shop, name):
    shop.names()
    before = set(sys.modules)
    sys.modules.pop("colorsys", None)
    with pytest.raises(ZooError, match="which is none"):
        shop.get(name)
    assert set(sys.modules) - before == set()
    assert "colorsys" not in sys.modules


class Entry:
    """An entry point of an installed package."""

    name, value = "fig", "figs:Fig"
    dist = types.SimpleNamespace(name="figs")

    def __init__(self, load):
        self.load = load


@pytest.fixture
def installed(monkeypatch):
    """Entry points of other packages, for the shop's group alone."""
    found = []

    def entries(group):
        return found if group == f"{HOME}.fruit" else entry_points(group=group)

    monkeypatch.setattr("zoo.registry.entry_points", entries)
    return found


def test_other_packages_enter_what_they_have(shop, installed):
    installed.append(Entry(lambda: shop.register("fig")(type("Fig", (), {}))))
    assert shop.names() == ["fig", "plum"]


def test_a_package_that_cant_be_loaded_is_named(shop, installed):
    def broken():
        raise ImportError("no module named stalk")

    installed.append(Entry(broken))
    with pytest.raises(
        ZooError, match=r"fruit: .*figs:Fig of figs can't be loaded: ImportError: no module named stalk"
    ):
        shop.names()


# ---------------------------------------------------------------------- files


def test_files_are_run_once_and_what_they_register_is_there(shop, plugins):
    plugins(cherry=f"{CHERRY}{HOME}.runs = getattr({HOME}, 'runs', 0) + 10\n")
    assert shop.names() == ["cherry", "plum"]
    shop._is_complete = False
    assert shop.names() == ["cherry", "plum"]
    assert sys.modules[HOME].runs == 11  # the package's one module, and the file


def test_several_files_are_named_as_in_path(shop, plugins):
    plugins(cherry=CHERRY, lime=CHERRY.replace("cherry", "lime").replace("Cherry", "Lime"))
    assert shop.names() == ["cherry", "lime", "plum"]


def test_files_of_one_name_in_two_folders_are_two(shop, plugins, tmp_path, monkeypatch):
    first, second = tmp_path / "a" / "shop_same.py", tmp_path / "b" / "shop_same.py"
    for file, name in ((first, "cherry"), (second, "lime")):
        file.parent.mkdir()
        file.write_text(CHERRY.replace("'cherry'", f"'{name}'"), encoding="utf-8")
    monkeypatch.setenv(PLUGINS, os.pathsep.join([str(first), str(second)]))
    assert shop.names() == ["cherry", "lime", "plum"]
    assert shop.get("cherry") is not shop.get("lime")
    assert sys.modules[shop.get("cherry").__module__].Cherry is shop.get("cherry")
    assert sys.modules[shop.get("lime").__module__].Cherry is shop.get("lime")


def test_files_of_one_name_dont_take_each_others_names(shop, tmp_path, monkeypatch):
    files = [tmp_path / folder / "shop_same.py" for folder in "ab"]
    for file in files:
        file.parent.mkdir()
        file.write_text(CHERRY, encoding="utf-8")
    monkeypatch.setenv(PLUGINS, os.pathsep.join(map(str, files)))
    with pytest.raises(ZooError, match="fruit: 'cherry' is registered already"):
        shop.names()


BROKEN = {
    "syntax": ("def broken(:\n", "can't be run: SyntaxError: "),
    "import": ("import no_such_package_anywhere\n", "can't be run: ModuleNotFoundError: "),
    "lines": ("raise ValueError('one\\ntwo')\n", "can't be run: ValueError: one two; mend it"),
    "end": ("raise SystemExit('bye')\n", "can't be run: SystemExit: bye"),
    "refused": (f"{CHERRY}{HOME}.register('Bad Name')\n", "can't be registered as 'Bad Name'"),
}


@pytest.mark.parametrize("what", BROKEN)
def test_a_broken_file_is_one_error_in_one_line_each_time(shop, plugins, what):
    text, message = BROKEN[what]
    plugins(broken=text)
    for _ in range(2):  # nothing of the half-run file is taken for done
        with pytest.raises(ZooError) as error:
            shop.names()
        assert message in str(error.value)
        assert "\n" not in str(error.value)
    assert not [name for name in sys.modules if name.startswith("zoo_plugin_shop")]


def test_a_mended_file_is_there_at_once(shop, plugins):
    plugins(broken="1 / 0\n")
    with pytest.raises(ZooError, match="ZeroDivisionError"):
        shop.names()
    plugins(broken=CHERRY)
    assert shop.names() == ["cherry", "plum"]


def test_a_file_that_isnt_there_or_isnt_python_is_named(shop, monkeypatch, tmp_path):
    text = tmp_path / "notes.txt"
    text.write_text("plum", encoding="utf-8")
    for given, message in (
        (tmp_path / "no.py", "there is no file .*no.py"),
        (tmp_path, "there is no file"),
        (text, r"notes\.txt is no file of Python; its name must end in \.py"),
    ):
        monkeypatch.setenv(PLUGINS, str(given))
        with pytest.raises(ZooError, match=f"^{PLUGINS}: .*{message}"):
            shop.names()


def test_gaps_between_files_and_the_home_folder_are_understood(shop, plugins, monkeypatch, tmp_path):
    (file,) = plugins(cherry=CHERRY)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv(PLUGINS, f"{os.pathsep}~/{file.name}{os.pathsep}")
    assert shop.names() == ["cherry", "plum"]
