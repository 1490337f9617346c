"""A study as its file describes it: arms, what they are compared at, and the protocol."""

import hashlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Literal

import yaml

from zoo.errors import ZooError
from zoo.options import option, parse_options

Match = Literal["steps", "parameters", "time"]
AGAIN = "again"
"""What the A/A arm is called after the reference's name."""

_LEAST_RATES, _LEAST_SEEDS = 5, 5


@dataclass(frozen=True)
class Protocol:
    """What a study's file says beside its arms; every value is printed in the report."""

    base: str = option("", "the config that every arm starts from, from here or from the study file's folder")
    figure: str = option("", "what is compared, as the task logs it for val/ and test/, such as bits_per_byte")
    better: Literal["lower", "higher"] = option("lower", "which way the figure is read")
    steps: int = option(0, "optimizer steps of a run at full budget")
    reference: str = option("", "the arm that the others are compared with")
    lrs: Sequence[float] = option((), "learning rates that every arm is tuned over")
    lr_setting: str = option("model.lr", "which setting is the learning rate")
    tuning_share: float = option(1 / 3, "share of the steps that a tuning run gets")
    tuning_seeds: Sequence[int] = option((1000,), "seeds of the tuning runs")
    extensions: int = option(3, "how many rates may be added where the best lies at an end of the list; 0 is none")
    seeds: Sequence[int] = option((0, 1, 2, 3, 4), "seeds of the runs at full budget")
    matched: Sequence[Match] = option(("steps",), "what arms are given alike: steps, parameters, time")
    size_setting: str = option("model.d_ff", "the setting that is changed to match parameters")
    parameters: int | None = option(None, "how many parameters to match; null is what the reference has")
    again: bool = option(True, "run the reference again with other seeds, to see what noise looks like (A/A)")
    level: float = option(0.95, "how sure the intervals are")
    validations: int = option(4, "how often a run is validated; its best weights are kept and tested")
    keep_checkpoints: bool = option(False, "keep the weights of every run")

    def __post_init__(self) -> None:
        rules = (
            ("base", self.base, bool(self.base), "name a config"),
            ("figure", self.figure, bool(self.figure) and "/" not in self.figure, "name it without val/ or test/"),
            ("steps", self.steps, self.steps >= 1, "must be at least 1"),
            ("lrs", list(self.lrs), len(set(self.lrs)) == len(self.lrs) > 0, "give one or more, each once"),
            ("lrs", list(self.lrs), all(0 < lr < math.inf for lr in self.lrs), "must be positive numbers"),
            ("tuning_share", self.tuning_share, 0 < self.tuning_share <= 1, "must lie in (0, 1]"),
            ("tuning_seeds", list(self.tuning_seeds), _are_seeds(self.tuning_seeds, 1), "give one or more, each once"),
            ("seeds", list(self.seeds), _are_seeds(self.seeds, 2), "give two or more, each once"),
            ("extensions", self.extensions, self.extensions >= 0, "must be 0 or more"),
            ("matched", list(self.matched), len(set(self.matched)) == len(self.matched) > 0, "give each once"),
            ("parameters", self.parameters, self.parameters is None or self.parameters > 0, "must be positive"),
            ("level", self.level, 0 < self.level < 1, "must lie in (0, 1)"),
            ("validations", self.validations, self.validations >= 1, "must be at least 1"),
        )
        for name, value, is_good, rule in rules:
            if not is_good:
                raise ZooError(f"got {value!r}; {rule}", argument=name)
        if both := set(self.seeds) & set(self.tuning_seeds):
            raise ZooError(f"got {min(both)}, which is one of seeds too; tune with others", argument="tuning_seeds")

    @property
    def tuning_steps(self) -> int:
        """Steps of a tuning run."""
        return max(1, round(self.steps * self.tuning_share))

    def deviations(self) -> list[str]:
        """Where the protocol asks for less than the house's: for the report."""
        found = []
        if len(self.lrs) < _LEAST_RATES:
            found.append(f"{len(self.lrs)} learning rates were tried, fewer than {_LEAST_RATES}")
        if not self.extensions:
            found.append("the list of learning rates was not extended where the best lay at its end")
        if len(self.seeds) < _LEAST_SEEDS:
            found.append(f"{len(self.seeds)} seeds were run, fewer than {_LEAST_SEEDS}")
        if not self.again:
            found.append("there is no A/A arm")
        missing = [match for match in ("steps", "parameters", "time") if match not in self.matched]
        if missing:
            found.append(f"nothing was compared at equal {' or '.join(missing)}")
        return found


def _are_seeds(seeds: Sequence[int], least: int) -> bool:
    return len(set(seeds)) == len(seeds) >= least and all(0 <= seed < 2**31 for seed in seeds)


@dataclass(frozen=True)
class Arm:
    """One of the things compared.

    Args:
        name: what it is called.
        settings: what it changes in the config, by dotted names as on the command line.
        config: a config in place of the study's.
        command: a program in place of ``lightning fit``, whose last line of output is its figures in JSON. It is given
            {lr}, {seed} and {steps} where its words say so.
    """

    name: str
    settings: Mapping[str, Any] = field(default_factory=dict)
    config: str | None = None
    command: tuple[str, ...] | None = None

    reserved: ClassVar[tuple[str, ...]] = ("config", "command")


@dataclass(frozen=True)
class Study:
    """A study: its name, its protocol, what all arms share, and the arms; the reference comes first.

    Args:
        name: what it is called; the study file's name.
        protocol: how arms are compared.
        settings: what all arms change in the config.
        arms: by name.
        configs: digest (SHA-256) of every config that an arm starts from, by path.
    """

    name: str
    protocol: Protocol
    settings: Mapping[str, Any]
    arms: Mapping[str, Arm]
    configs: Mapping[str, str]

    Options: ClassVar[type] = Protocol

    @property
    def reference(self) -> Arm:
        return self.arms[self.protocol.reference]

    def config_of(self, arm: Arm) -> str:
        """The config that an arm starts from."""
        return arm.config or self.protocol.base


def read_study(path: str | Path) -> Study:
    """Read and check a study's file.

    Raises:
        ZooError: naming the part, what it has, and the rule.
    """
    file = Path(path)
    if not file.is_file():
        raise ZooError(f"STUDY: there is no file {file}; name a YAML file, such as one of configs/study")
    try:
        found = yaml.safe_load(file.read_text(encoding="utf-8"))
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ZooError(f"STUDY: {file} is no YAML ({' '.join(str(error).split())[:160]}); mend it") from None
    if not isinstance(found, dict):
        raise ZooError(
            f"STUDY: {file} holds a {type(found).__name__}; it must have arms, base, steps and so on by name"
        )
    try:
        return _study(file, {str(name): value for name, value in found.items()})
    except ZooError as error:
        raise error.about("STUDY", file) from None


def _study(file: Path, found: dict[str, Any]) -> Study:
    settings = _settings(found.pop("settings", None) or {}, "settings")
    arms = found.pop("arms", None)
    if not isinstance(arms, dict) or not arms:
        raise ZooError(f"arms: got {arms!r}; give arms by name, each with the settings that it changes")
    protocol: Protocol = parse_options(Study, found, "study")
    made = {str(name): _arm(str(name), given, file) for name, given in arms.items()}
    if protocol.reference not in made:
        raise ZooError(f"reference: got {protocol.reference!r}; must be one of the arms, {', '.join(made)}")
    if protocol.again and f"{protocol.reference} {AGAIN}" in made:
        raise ZooError(f"arms: {protocol.reference} {AGAIN} is the A/A arm's name; choose another")
    if made[protocol.reference].command is not None and tuple(protocol.matched) != ("steps",):
        raise ZooError(
            f"reference: got {protocol.reference}, which is a command, so only steps can be matched; set matched "
            "to [steps], or name an arm of lightning fit"
        )
    own = (protocol.lr_setting, "seed_everything", "trainer.max_steps", "trainer.logger", "trainer.callbacks")
    for where, given in (("settings", settings), *((f"arms.{arm.name}", arm.settings) for arm in made.values())):
        for name in own:
            if name in given:
                raise ZooError(f"{where}.{name}: the study sets it itself; leave it out")
    first = made.pop(protocol.reference)
    base = _found(protocol.base, file, "base")
    protocol = Protocol(**{**vars(protocol), "base": base})
    ordered = {first.name: first, **made}
    configs = {config: _digest(config) for config in {base, *(arm.config for arm in ordered.values() if arm.config)}}
    return Study(file.stem, protocol, settings, ordered, configs)


def _settings(given: Any, where: str) -> dict[str, Any]:
    if not isinstance(given, dict):
        raise ZooError(f"{where}: got {given!r}; give settings by dotted names, such as model.d_ff: 512")
    for name in given:
        if not isinstance(name, str) or "." not in name:
            raise ZooError(
                f"{where}: got {name!r}; settings have dotted names as on the command line, such as model.attention"
            )
    return dict(given)


def _arm(name: str, given: Any, file: Path) -> Arm:
    where = f"arms.{name}"
    if not name or "/" in name or name != name.strip():
        raise ZooError(f"arms: got the name {name!r}; choose one without a slash and without spaces around it")
    if given is not None and not isinstance(given, dict):
        raise ZooError(f"{where}: got {given!r}; give settings by dotted names, or a command, or a config")
    left = dict(given or {})
    command, config = left.pop("command", None), left.pop("config", None)
    if command is not None:
        if (
            not isinstance(command, list)
            or not command
            or not all(isinstance(word, (str, int, float)) for word in command)
        ):
            raise ZooError(f"{where}.command: got {command!r}; give a list of words")
        if left or config:
            raise ZooError(f"{where}: has settings beside a command, which reads none; leave one of them out")
    if config is not None:
        config = _found(str(config), file, f"{where}.config")
    words = None if command is None else tuple(map(str, command))
    return Arm(name, _settings(left, where), config, words)


def _found(given: str, file: Path, where: str) -> str:
    for path in (Path(given), file.parent / given):
        if path.is_file():
            return str(path)
    raise ZooError(
        f"{where}: there is no file {given}, here or in {file.parent}; name a config that lightning fit takes"
    )


def _digest(config: str) -> str:
    return hashlib.sha256(Path(config).read_bytes()).hexdigest()
