"""The register of names that users add to."""

from types import SimpleNamespace

import pytest

import zoo.registry
from zoo.errors import ZooError
from zoo.registry import Registry, load_plugin


@pytest.fixture
def things(monkeypatch):
    monkeypatch.delenv("ZOO_PLUGINS", raising=False)
    return Registry("thing", None, "damcha_zoo.nothing")


class One: ...


class Two: ...


def test_a_name_stands_for_what_was_registered(things):
    assert things.register("one")(One) is One
    things.register("two")(Two)
    assert things.names() == ["one", "two"]
    assert things.get("two") is Two


def test_a_name_is_taken_once_but_the_same_may_come_again(things):
    things.register("one")(One)
    things.register("one")(One)
    with pytest.raises(ZooError, match=r"thing: 'one' is registered already, by .*One; register .*Two under another"):
        things.register("one")(Two)
    assert things.get("one") is One


@pytest.mark.parametrize("name", ["", "One", "1st", "a-b", "a b", "ä", "../x"])
def test_a_name_is_small_letters_digits_and_underscores(things, name):
    with pytest.raises(ZooError, match="thing: can't be registered as"):
        things.register(name)


def test_an_unknown_name_is_refused_with_the_nearest_and_all(things):
    things.register("one")(One)
    with pytest.raises(ZooError, match=r"^model\.thing: got 'onne', which is none; do you mean one\? there are one$"):
        things.get("onne", "model.thing")


def test_a_name_imports_nothing(things, tmp_path, monkeypatch):
    (tmp_path / "trap.py").write_text("raise SystemExit('ran')")
    monkeypatch.syspath_prepend(tmp_path)
    for name in ("trap", "trap.py", "trap:One", str(tmp_path / "trap.py")):
        with pytest.raises(ZooError, match="which is none"):
            things.get(name)


def test_plugins_and_entry_points_are_run_once_when_a_name_is_asked_for(things, tmp_path, monkeypatch):
    plugin, calls = tmp_path / "mine.py", []
    plugin.write_text("import builtins\nbuiltins.ran_for_a_test = getattr(builtins, 'ran_for_a_test', 0) + 1")
    monkeypatch.setenv("ZOO_PLUGINS", str(plugin))
    entry = SimpleNamespace(load=lambda: (calls.append(1), things.register("installed")(One)))
    monkeypatch.setattr(zoo.registry, "entry_points", lambda group: [entry] if group == "damcha_zoo.nothing" else [])
    assert things.names() == things.names() == ["installed"]
    assert calls == [1]
    import builtins

    assert builtins.__dict__.pop("ran_for_a_test") == 1


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        ("gone.py", None, "ZOO_PLUGINS: there is no file"),
        ("broken.py", "1 / 0", "ZOO_PLUGINS: .*broken.py can't be run: ZeroDivisionError: division by zero; mend it"),
        ("unread.py", "def (", "ZOO_PLUGINS: .*unread.py can't be run: SyntaxError"),
        ("notes.txt", "x", r"ZOO_PLUGINS: .*notes.txt is no file of Python; its name must end in \.py"),
    ],
)
def test_a_plugin_that_cannot_be_run_is_named_in_one_line(name, text, said, things, tmp_path, monkeypatch):
    if text is not None:
        (tmp_path / name).write_text(text)
    monkeypatch.setenv("ZOO_PLUGINS", str(tmp_path / name))
    for _ in range(2):  # and again: nothing is taken for found
        with pytest.raises(ZooError, match=said) as error:
            things.names()
        assert "\n" not in str(error.value)


def test_a_plugin_is_one_module_however_often_it_is_named(tmp_path):
    (tmp_path / "once.py").write_text("class Here: ...")
    assert load_plugin(str(tmp_path / "once.py")) is load_plugin(str(tmp_path / "once.py"))
