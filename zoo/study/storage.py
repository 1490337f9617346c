"""Where a study keeps what its runs came to: an Optuna study, which several processes and machines may share."""

import json
import math
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, fields
from pathlib import Path
from typing import TYPE_CHECKING

from filelock import BaseFileLock, FileLock

from zoo.errors import ZooError
from zoo.study.plan import Measure, Outcome, Run

if TYPE_CHECKING:
    import optuna

HEARTBEAT_SECONDS = 15
"""How often a process that is at a run says so; one that said nothing for four times as long is taken for dead."""

_KEY, _OUTCOME, _MEASURE = "key", "outcome", "measure:"


class RunFailed(Exception):
    """A run that ended neither with a figure nor by diverging."""

    def __init__(self, outcome: Outcome) -> None:
        super().__init__(outcome.error)
        self.outcome = outcome


class Storage:
    """The runs of a study, in an Optuna storage.

    A run is a trial with the run's key. A process takes a run by adding a trial for it and asking for one that waits;
    of two trials of one run the first counts, so no run is run twice at once. A process that dies leaves a trial
    without a heartbeat, which the next one takes for failed, and its run is due again.

    Args:
        url: of the database, as Optuna's RDBStorage takes it.
        name: of the Optuna study.
        heartbeat_seconds: how often a process at a run says so; left out, ``HEARTBEAT_SECONDS``.

    Raises:
        ZooError: if there is no Optuna, or the database can't be used.
    """

    def __init__(self, url: str, name: str, heartbeat_seconds: int | None = None) -> None:
        self.url, self.name = url, name
        self.heartbeat_seconds = heartbeat_seconds or HEARTBEAT_SECONDS
        self.study = self._open()

    def _open(self) -> "optuna.Study":
        try:
            import optuna
        except ImportError:
            raise ZooError("zoo study: needs optuna; pip install optuna, or 'damcha-zoo[study]'") from None
        optuna.logging.set_verbosity(optuna.logging.ERROR)
        warnings.filterwarnings("ignore", category=optuna.exceptions.ExperimentalWarning)
        for attempt in range(5):
            try:
                storage = optuna.storages.RDBStorage(
                    self.url,
                    heartbeat_interval=self.heartbeat_seconds,
                    grace_period=4 * self.heartbeat_seconds,
                )
                return optuna.create_study(storage=storage, study_name=self.name, load_if_exists=True)
            except Exception as error:  # SQLAlchemy's own kinds, and those of any driver
                if attempt == 4:
                    raise ZooError(
                        f"--storage: can't use {self.url} ({' '.join(str(error).split())[:160]}); name a database as "
                        "SQLAlchemy does, such as sqlite:///study.db"
                    ) from None
                time.sleep(0.2 * 2**attempt)  # another process may be making the tables
        raise AssertionError

    def another(self) -> "Storage":
        """The same for another thread."""
        return Storage(self.url, self.name, self.heartbeat_seconds)

    # ------------------------------------------------------------------ what is known

    def outcomes(self, with_failed: bool = False) -> dict[str, Outcome]:
        """What finished runs came to, by key; failed ones too, where nothing better is known, if they are asked for."""
        import optuna

        found: dict[str, Outcome] = {}
        for trial in self.study.get_trials(deepcopy=False):
            known = trial.user_attrs.get(_OUTCOME)
            if known is None or trial.user_attrs.get(_KEY) is None:
                continue
            if trial.state == optuna.trial.TrialState.COMPLETE:
                found[trial.user_attrs[_KEY]] = _outcome(known)
            elif with_failed:
                found.setdefault(trial.user_attrs[_KEY], _outcome(known))
        return found

    def running(self) -> set[str]:
        """Keys of the runs that some process is at, as far as is known."""
        import optuna

        optuna.storages.fail_stale_trials(self.study)
        state = (optuna.trial.TrialState.RUNNING,)
        return {t.user_attrs[_KEY] for t in self.study.get_trials(deepcopy=False, states=state) if _KEY in t.user_attrs}

    def measures(self) -> dict[str, Measure]:
        """What was measured of arms, by what they were measured by."""
        known = {field.name for field in fields(Measure)}
        return {
            name.removeprefix(_MEASURE): Measure(**{k: v for k, v in json.loads(value).items() if k in known})
            for name, value in self.study.user_attrs.items()
            if name.startswith(_MEASURE)
        }

    def keep_measure(self, key: str, measure: Measure) -> None:
        """Keep what was measured, once for all processes: what is there already stays."""
        if _MEASURE + key not in self.study.user_attrs:
            self.study.set_user_attr(_MEASURE + key, json.dumps(asdict(measure)))

    # ------------------------------------------------------------------ a run

    def take(self, run: Run, execute: Callable[[Run, int], Outcome], planned: Mapping[str, Run]) -> None:
        """Take a run, or another that waits, and do it; if another process has it by now, do nothing.

        Args:
            run: the one that is wanted.
            execute: does a run, given it and the number of its trial.
            planned: the study's runs by key.

        Raises:
            RunFailed: if it ended neither with a figure nor by diverging; it is due again when the study is next run.
        """
        import optuna

        asked = {"lr": run.lr, "seed": run.seed}
        attributes = {_KEY: run.key, "arm": run.arm, "stage": run.stage, "steps": run.steps}
        held: list[BaseFileLock | None] = []

        def objective(trial: "optuna.Trial") -> float:
            for turn in held:
                if turn is not None:
                    turn.release()
            key = str(trial.user_attrs.get(_KEY))
            own = planned.get(key)
            if own is None or self._is_taken(key, trial.number):
                raise optuna.TrialPruned("another process has it, or the study has no such run any more")
            trial.suggest_float("lr", 1e-12, 1e6)  # as asked; so that Optuna's dashboard shows them
            trial.suggest_int("seed", 0, 2**31)
            outcome = execute(own, trial.number)
            trial.set_user_attr(_OUTCOME, json.dumps(asdict(outcome)))
            if outcome.status == "failed":
                raise RunFailed(outcome)
            return outcome.value

        # Two processes may find the same trial waiting in a SQLite file, which knows no lock of a row.
        with self._turn() as turn:
            held.append(turn)
            if self._is_taken(run.key):
                return
            self.study.enqueue_trial(asked, user_attrs=attributes)
            self.study.optimize(objective, n_trials=1)

    @contextmanager
    def _turn(self) -> Iterator[BaseFileLock | None]:
        """The right to take a run, where the database is a file; released as soon as one is taken."""
        path = self.url.removeprefix("sqlite:///")
        if path == self.url:
            yield None
            return
        lock = FileLock(f"{path}.lock", thread_local=False)
        lock.acquire()
        try:
            yield lock
        finally:
            lock.release()

    def _is_taken(self, key: str, number: int | None = None) -> bool:
        """Whether a run is done, or another process is at it: at a trial before this one, or at any."""
        import optuna

        states = (optuna.trial.TrialState.RUNNING, optuna.trial.TrialState.COMPLETE)
        return any(
            trial.user_attrs.get(_KEY) == key
            and trial.number != number
            and (number is None or trial.number < number or trial.state == states[1])
            for trial in self.study.get_trials(deepcopy=False, states=states)
        )


def _outcome(text: str) -> Outcome:
    known = {field.name for field in fields(Outcome)}
    return Outcome(**{name: value for name, value in json.loads(text).items() if name in known})


def storage_url(folder: Path, given: str | None) -> str:
    """The database of a study: the one that is given, or a file in its folder."""
    return given or f"sqlite:///{(folder / 'study.db').as_posix()}"


def worst(lower_is_better: bool) -> float:
    """The figure of a run that diverged."""
    return math.inf if lower_is_better else -math.inf
