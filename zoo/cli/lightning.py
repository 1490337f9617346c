"""Lightning's own command line, with three things added: a checkpoint alone is enough, ``--ckpt_path last`` finds the
newest run of a config, and a run ends by saying where its results are."""

import json
import logging
import os
import re
import sys
import warnings
import zipfile
from pathlib import Path
from typing import Any, NoReturn

import lightning.pytorch as pl
from jsonargparse import Namespace, set_parsing_settings
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint
from lightning.pytorch.cli import ArgsType, LightningArgumentParser, LightningCLI, SaveConfigCallback
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger
from lightning.pytorch.strategies import Strategy
from lightning.pytorch.utilities.exceptions import SIGTERMException

import datamodules  # noqa: F401  (its classes can then be named without their module)
import zoo.callbacks  # noqa: F401
from zoo.attention.describe import describe, describe_all
from zoo.callbacks import BestAndLastCheckpoint, PredictionWriter
from zoo.checkpoint import Checkpoint
from zoo.errors import ZooError, listed
from zoo.families import class_path, data_class, families, task_class
from zoo.tasks import ZooTask

_KEYWORDS = ("last", "best", "hpc")


def checkpoint_config(checkpoint: Checkpoint) -> dict[str, Any]:
    """The part of a config that a checkpoint can stand in for: model and data as they were trained.

    Raises:
        ZooError: if it names other classes or settings than this zoo has.
    """
    claim, path = checkpoint.claim, checkpoint.path
    config: dict[str, Any] = {
        "model": {"class_path": class_path(task_class(claim, path)), "init_args": checkpoint.settings}
    }
    if (kind := data_class(claim, path)) is not None:
        init_args = checkpoint.data_settings | kind.as_in_checkpoint(path)
        config["data"] = {"class_path": class_path(kind), "init_args": init_args}
    return config


class ZooParser(LightningArgumentParser):
    """Says what is wrong with an argument in one line, without the whole usage."""

    def error(self, message: str, ex: Exception | None = None) -> NoReturn:
        text = " ".join(message.split())
        if "surrogates not allowed" in text:
            text = f"{text.partition(':')[0]}: got a name whose bytes are no UTF-8; rename that file or folder"
        wanted = list(dict.fromkeys(re.findall(r"Expected an? <class '(\w+)'>", text)))
        got = re.search(r"(?:Got value|Given value): (\S+)", text)
        for detail in (" Given value type:", " Subtypes:", " tip:"):
            text = text.partition(detail)[0]
        text = text.replace("Does not validate against any of the Union subtypes", "").strip()
        if text.endswith(":") and wanted and got:
            kinds = " or ".join(kind.replace("NoneType", "null") for kind in wanted)
            text = f"{text} got {got[1]}; expected {kinds}"
        if "are required" in text and "model" in text:
            text = "--config: got none; name a config, or with --ckpt_path FILE use a checkpoint alone"
        print(f"error: {text}; see --help, --model.help CLASS and --data.help CLASS", file=sys.stderr)
        raise SystemExit(2)


def quiet_advertisements() -> None:
    """Leave out of a run's output what no user can act on: tips for other products, Lightning's own deprecations."""
    for name in ("lightning.pytorch.utilities.rank_zero", "lightning.fabric.utilities.rank_zero"):
        logging.getLogger(name).addFilter(lambda record: "Tip: For seamless" not in record.getMessage())
    warnings.filterwarnings("ignore", message=".*LeafSpec.* is deprecated")
    warnings.filterwarnings("ignore", message="Checkpoint directory .* exists and is not empty")  # of runs that go on
    warnings.filterwarnings("ignore", message="Experiment logs directory .* exists and is not empty")  # see _keep_table
    warnings.filterwarnings("ignore", message=r"Found \d+ module\(s\) in eval mode")  # model.train says which


def _option(args: list[str], name: str) -> str | None:
    value = None
    for i, argument in enumerate(args):
        if argument == name and i + 1 < len(args):
            value = args[i + 1]
        elif argument.startswith(f"{name}="):
            value = argument.partition("=")[2]
    return value


class RunConfig(SaveConfigCallback):
    """Keep the settings of a run in its folder, as config.yaml; where there is none, nowhere."""

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        if trainer.loggers and isinstance(trainer.loggers[0], (TensorBoardLogger, CSVLogger)):
            super().setup(trainer, pl_module, stage)

    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Where no logger has a folder, that of the checkpoints is the run's, unless the user shares it among runs."""
        checkpoints = getattr(trainer.checkpoint_callback, "dirpath", None)
        if self.already_saved or checkpoints is None or Path(checkpoints).name != "checkpoints":
            return
        self.already_saved = True
        if trainer.is_global_zero:
            folder = Path(checkpoints).parent
            folder.mkdir(parents=True, exist_ok=True)
            self.parser.save(self.config, folder / self.config_filename, skip_none=False, overwrite=True)


class ZooCLI(LightningCLI):
    """``lightning fit|validate|test|predict``; every flag is Lightning's own but ``--predictions.path``."""

    _checkpoint: Checkpoint | None = None
    """What ``--ckpt_path`` stands for; held, so that no part of the run reads the file again."""

    def __init__(self, args: ArgsType = None) -> None:
        quiet_advertisements()
        families()  # those of ZOO_PLUGINS can then be named in configs
        self._given: Any = sys.argv[1:] if args is None else args
        set_parsing_settings(instantiate_subclass_spec_in_any=False)  # no setting of ours is an object to make
        super().__init__(
            ZooTask,
            pl.LightningDataModule,
            subclass_mode_model=True,
            subclass_mode_data=True,
            seed_everything_default=0,
            save_config_callback=RunConfig,
            save_config_kwargs={"overwrite": True},  # a resumed run goes on in its own folder
            load_from_checkpoint_support=False,  # our checkpoints carry plain settings
            parser_class=ZooParser,
            parser_kwargs={"description": "Train, test and use the models of the zoo."},
            args=args,
        )

    def subcommands(self) -> dict[str, set[str]]:  # type: ignore[override]  # of an object: what is asked of this one
        """The subcommand that is given, or all: each has a parser, which takes a quarter of a second to make."""
        known = super().subcommands()
        first = self._given[0] if isinstance(self._given, list) and self._given else None
        return {first: known[first]} if first in known else known

    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        parser.add_lightning_class_args(PredictionWriter, "predictions")
        parser.add_argument(
            "--use_multihead_M",
            nargs="?",
            const=True,
            type=bool,
            help="Accepted, as the method's own command line has it; changes nothing: sums are always a head's own.",
        )

    def parse_arguments(self, parser: LightningArgumentParser, args: ArgsType) -> None:
        given = self._given
        if isinstance(given, list):
            _help_on_attention(given)
        if isinstance(given, list) and any(".help" in str(argument) for argument in given):
            for kind in (kind for family in families() for kind in family.datas):
                kind.name_sources()
        if isinstance(given, list) and given and not given[0].startswith("-"):
            path = _option(given, "--ckpt_path")
            if path and path not in _KEYWORDS:
                self._checkpoint = Checkpoint.open(path)
                base = json.dumps(checkpoint_config(self._checkpoint))
                self.config = parser.parse_args([given[0], "--config", base, *given[1:]])
                return
        super().parse_arguments(parser, args)
        if isinstance(given, list) and given and _option(given, "--ckpt_path") == "last":
            config = self.config[given[0]]
            self._checkpoint = Checkpoint.open(_newest(config))
            model = checkpoint_config(self._checkpoint)["model"]  # beneath what the config says, as for a file
            if model["class_path"] == config.model.class_path:
                base = json.dumps({"model": model})
                self.config = parser.parse_args([given[0], "--config", base, *given[1:]])

    def _add_configure_optimizers_method_to_model(self, subcommand: str | None) -> None:
        """Hand --optimizer and --lr_scheduler to the task, which makes them when there are parameters."""
        optimizer, lr_scheduler = (self._get(self.config_init, name) for name in ("optimizer", "lr_scheduler"))
        self.model.choose_optimizer(*(_chosen(given) for given in (optimizer, lr_scheduler)))

    def _parse_ckpt_path(self) -> None:
        """Lightning would let the checkpoint's settings override the user's; ``checkpoint_config`` is beneath them."""

    def before_instantiate_classes(self) -> None:
        config = self.config[self.subcommand]
        for callback in _listed(config.trainer.callbacks):
            if _name(callback) == "ModelCheckpoint" and callback.get("init_args", {}).get("save_last"):
                callback.class_path = class_path(BestAndLastCheckpoint)  # in configs from before there was one
        for logger in _listed(config.trainer.logger):
            if logger.get("init_args", {}).get("save_dir"):  # some loggers expand it, and what goes by it doesn't
                logger.init_args.save_dir = os.path.expanduser(logger.init_args.save_dir)
        if config.trainer.logger is False:
            _leave_out(config.trainer, "LearningRateMonitor")
        if self.subcommand != "fit":  # only a run that goes on needs the callbacks of the one before
            warnings.filterwarnings("ignore", message=".*callbacks used to create the checkpoint need to be provided")
            warnings.filterwarnings("ignore", message="The dirpath has changed from")
        path = config.get("ckpt_path")
        if path and path not in _KEYWORDS:
            self._checkpoint = Checkpoint.open(path)
            config.ckpt_path = self._checkpoint.path
        if path == "last":
            self._find_last(config)
        elif path is None and self.subcommand != "fit":
            raise ZooError(
                f"--ckpt_path: got none, and {self.subcommand} needs trained weights; name a checkpoint file, a model "
                "of zoo list, or last for the newest run of this config"
            )
        elif path is not None and (path in _KEYWORDS or not path):
            raise ZooError(
                f"--ckpt_path: got {path!r}; name a checkpoint file, or last for the newest run of this config"
            )

    def _find_last(self, config: Any) -> None:
        """Turn ``last`` into the newest last.ckpt of this config's runs, and go on in that run's folder."""
        newest = _newest(config)
        config.ckpt_path = str(newest)
        if self.subcommand != "fit":
            return
        loggers = [logger for logger in _listed(config.trainer.logger) if "init_args" in logger]
        for logger in _listed(config.trainer.logger):
            if logger.get("init_args", {}).get("save_dir"):  # some loggers expand it, and what goes by it doesn't
                logger.init_args.save_dir = os.path.expanduser(logger.init_args.save_dir)
        if config.trainer.logger is False:
            for callback in _listed(config.trainer.callbacks):
                if _name(callback) == "BestAndLastCheckpoint" and not callback.init_args.get("dirpath"):
                    callback.init_args.dirpath = str(newest.parent)
        elif not loggers:  # Lightning's own choice, at its own place
            run = newest.parent.parent
            place = {"save_dir": str(run.parent.parent), "name": run.parent.name, "version": run.name}
            where = Namespace(**place)  # type: ignore[no-untyped-call]
            board = Namespace(class_path=class_path(TensorBoardLogger), init_args=where)  # type: ignore[no-untyped-call]
            config.trainer.logger = board
        elif newest.parent.parent.parent == _runs_of(loggers[0]):  # the others begin a new version
            loggers[0].init_args.version = newest.parent.parent.name
            _keep_table(newest.parent.parent / "metrics.csv", loggers[0].class_path)

    def instantiate_classes(self) -> None:
        super().instantiate_classes()
        if type(self.trainer.strategy).load_checkpoint is not Strategy.load_checkpoint:
            self._checkpoint = None  # a sharded strategy reads the file itself

    def fit(self, model: pl.LightningModule, **arguments: Any) -> None:
        """As the trainer's; a run that was told to stop does not end as if it were finished."""
        try:
            self.trainer.fit(model, **arguments)
        except RuntimeError as error:
            if not str(error).startswith("Early stopping conditioned on metric"):
                raise
            raise ZooError(f"EarlyStopping.monitor: {_monitored(self.trainer)}; name one of these") from None
        except (TypeError, LookupError, AttributeError, ValueError) as error:
            given = self._get(self.config, "ckpt_path")
            if given is None or self.model.has_begun:
                raise
            reason = f"{type(error).__name__}: {' '.join(str(error).split())[:160]}"
            raise ZooError(
                f"no run can go on from {given} ({reason}); it was altered, or is of "
                "another optimizer, so take another",
                argument="checkpoint",
            ) from None
        except SIGTERMException:
            print("error: fit was told to stop; --ckpt_path last goes on with it", file=sys.stderr)
            raise SystemExit(143) from None

    def after_fit(self) -> None:
        """Say where the results are."""
        if not self.trainer.is_global_zero:
            return
        for callback in self.trainer.checkpoint_callbacks:
            if not isinstance(callback, ModelCheckpoint):
                continue
            if callback.last_model_path and not callback.best_model_path:
                print(f"Newest checkpoint: {_shown(callback.last_model_path)} (none was validated)")
            if callback.best_model_path and callback.monitor is not None:
                best = _shown(callback.best_model_path)
                score = callback.best_model_score
                reached = "" if score is None else f" ({callback.monitor} {float(score):.4f})"
                print(f"Best checkpoint: {best}{reached}")
        for logger in self.trainer.loggers:
            if isinstance(logger, TensorBoardLogger):
                print(f"Curves, samples and pictures: tensorboard --logdir {_shown(logger.log_dir)}")


def _chosen(given: Any) -> dict[str, Any] | None:
    return None if not given else given.as_dict() if isinstance(given, Namespace) else dict(given)


def _help_on_attention(args: list[str]) -> None:
    """Print what --model.attention.help NAME asks for, and end; without a name, what attentions there are."""
    option = "--model.attention.help"
    for i, argument in enumerate(args):
        if argument.partition("=")[0] == option:
            name = argument.partition("=")[2] or (args[i + 1] if i + 1 < len(args) else "")
            is_name = bool(name) and not name.startswith("-")
            print(describe(name, option) if is_name else f"{describe_all()}\n\n{option} NAME describes one.")
            raise SystemExit(0)


def _monitored(trainer: pl.Trainer) -> str:
    """What callbacks wait for in vain, and what there is."""
    callbacks: list[pl.Callback] = getattr(trainer, "callbacks", [])
    there = sorted(trainer.callback_metrics)
    missing = [c.monitor for c in callbacks if isinstance(c, EarlyStopping) and c.monitor not in there]
    return f"got {listed(missing)}; this run has {listed(there, shown=20)}"


def _listed(given: Any) -> list[Any]:
    """The classes that a setting of the trainer names, which may be none, one or several."""
    found = given if isinstance(given, list) else [given]
    return [item for item in found if hasattr(item, "class_path")]


def _leave_out(trainer: Any, name: str) -> None:
    """Take a callback that only draws out of a run that draws nowhere; Lightning would refuse it."""
    callbacks = _listed(trainer.callbacks)
    kept = [callback for callback in callbacks if _name(callback) != name]
    if len(kept) < len(callbacks):
        trainer.callbacks = kept
        print(f"trainer.logger: false, so {name} is left out", file=sys.stderr)


def _name(given: Any) -> str:
    """The name of the class that a setting names, without its module."""
    return str(given.class_path).rpartition(".")[2]


def _runs_of(logger: Any) -> Path:
    """The folder with a folder a run of a logger."""
    name = logger.init_args.get("name")
    return Path(os.path.expanduser(logger.init_args.save_dir)) / ("lightning_logs" if name is None else name)


def _newest(config: Any) -> Path:
    """The newest last.ckpt of a config's runs.

    Raises:
        ZooError: if there is none.
    """
    loggers = [logger for logger in _listed(config.trainer.logger) if logger.get("init_args", {}).get("save_dir")]
    root = Path(config.trainer.default_root_dir or ".").expanduser()
    folders = [_runs_of(logger) for logger in loggers] or [root / "lightning_logs"]
    own = [
        Path(callback.init_args.dirpath).expanduser()
        for callback in _listed(config.trainer.callbacks)
        if callback.get("init_args", {}).get("dirpath")
    ]
    places = [path for folder in folders for path in folder.glob("*/checkpoints/last*.ckpt")]
    places += [path for folder in own for path in folder.glob("last*.ckpt")]
    found = sorted(places, key=lambda path: path.stat().st_mtime)
    while found and not zipfile.is_zipfile(found[-1]) and len(found) > 1:
        found.pop()  # cut short by another program: the one before will do
    if not found:
        where = listed([str(folder) for folder in [*folders, *own]])
        raise ZooError(
            f"--ckpt_path: got last, but no run under {where} has a last.ckpt; start one without --ckpt_path, or name "
            "a checkpoint file"
        )
    return found[-1]


def _keep_table(table: Path, logger: str) -> None:
    """A CSVLogger deletes the table of a run that goes on; keep it under another name."""
    if logger.endswith("CSVLogger") and table.is_file():
        number = 1
        while (kept := table.with_name(f"metrics.{number}.csv")).exists():
            number += 1
        table.rename(kept)
        print(f"Figures of the run so far: {_shown(str(kept))}", file=sys.stderr)


class _ClassesOnly(ZooCLI):
    """Makes a config's model and data, and nothing of its trainer."""

    def _set_seed(self) -> None: ...

    def before_instantiate_classes(self) -> None: ...

    def instantiate_classes(self) -> None:
        config = self.config["fit"]
        wanted = Namespace(model=config.model, data=config.data)  # type: ignore[no-untyped-call]
        made = self._parser("fit").instantiate_classes(wanted)
        self.model, self.datamodule = made.model, made.data

    def _run_subcommand(self, subcommand: str) -> None: ...


def read_classes(config: str) -> tuple[ZooTask, pl.LightningDataModule]:
    """The model and the data of a config file, as ``lightning fit --config`` makes them.

    Raises:
        ZooError: if there is no such file, or a setting is refused.
        SystemExit: for what the parser refuses, which it says itself.
    """
    if not Path(config).is_file():
        raise ZooError(f"--config: there is no file {config}; name one that lightning fit takes")
    return classes_of(["fit", "--config", config])


def classes_of(arguments: list[str]) -> tuple[ZooTask, pl.LightningDataModule]:
    """The model and the data of a command line of ``lightning fit``.

    Raises:
        ZooError: if a setting is refused.
        SystemExit: for what the parser refuses, which it says itself.
    """
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*LightningCLI's args parameter")
        warnings.filterwarnings("ignore", category=DeprecationWarning, module="jsonargparse")
        cli = _ClassesOnly(arguments)
    return cli.model, cli.datamodule


def _shown(path: str) -> Path:
    """A path as short as it can be typed here."""
    full = Path(path).resolve()
    return full.relative_to(Path.cwd()) if full.is_relative_to(Path.cwd()) else full
