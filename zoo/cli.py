"""The two console scripts: ``lightning`` trains, tests and predicts; ``zoo`` uses what was trained."""

import argparse
import os
import sys
from collections.abc import Callable, Sequence
from typing import Any

from zoo.errors import ZooError


def _one_line(run: Callable[[], None]) -> None:
    """Run; end a user's mistake in one line on standard error and exit code 2."""
    try:
        run()
    except BrokenPipeError:  # the reader (head, less) has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise SystemExit(1) from None
    except Exception as error:
        from lightning.fabric.utilities.exceptions import MisconfigurationException  # takes seconds: not for --help

        cause: BaseException | None = error
        while cause is not None and not isinstance(cause, (ZooError, MisconfigurationException)):
            cause = cause.__cause__  # jsonargparse wraps what a constructor raises
        if cause is None:
            raise
        print(f"error: {' '.join(str(cause).split())}", file=sys.stderr)
        raise SystemExit(2) from None


# ---------------------------------------------------------------------- lightning


def lightning_main() -> None:
    """Entry point of ``lightning`` and of ``python -m zoo``."""
    from zoo.lightning_cli import ZooCLI

    _one_line(lambda: (ZooCLI(), None)[1])


# ---------------------------------------------------------------------- zoo


def zoo_main(args: Sequence[str] | None = None) -> None:
    """Entry point of ``zoo``."""
    parser = argparse.ArgumentParser(
        prog="zoo", description="Use trained models of the zoo. To train one: lightning fit --config configs/..."
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    _add_generate(commands)
    chosen = parser.parse_args(args)
    _one_line(lambda: chosen.run(chosen))


def _add_generate(commands: Any) -> None:
    generate = commands.add_parser(
        "generate",
        help="continue a text",
        description="Continue a text with a trained language model, printing it as it is made.",
    )
    generate.add_argument("--ckpt", required=True, metavar="FILE", help="the checkpoint; nothing else is needed")
    generate.add_argument("--prompt", default="", help="the text to continue; - reads standard input; default: none")
    generate.add_argument("--max-new-tokens", type=int, default=200, metavar="N", help="default: %(default)s")
    generate.add_argument(
        "--temperature", type=float, default=0.8, metavar="X", help="0 takes the likeliest token; default: %(default)s"
    )
    generate.add_argument("--top-k", type=int, metavar="K", help="choose among the K likeliest tokens only")
    generate.add_argument(
        "--top-p",
        type=float,
        default=0.95,
        metavar="P",
        help="among the likeliest with probability P; default: %(default)s",
    )
    generate.add_argument("--seed", type=int, metavar="N", help="makes the text repeatable")
    generate.add_argument(
        "--stop", action="append", default=[], metavar="TEXT", help="end before TEXT; may be repeated"
    )
    generate.add_argument("--device", default="cpu", help="where to run, such as cpu or cuda; default: %(default)s")
    generate.set_defaults(run=_generate)


def _generate(chosen: argparse.Namespace) -> None:
    task = load_language_task(chosen.ckpt, chosen.device)
    prompt = sys.stdin.read() if chosen.prompt == "-" else chosen.prompt
    sys.stdout.write(prompt)
    pieces = task.stream(
        [prompt],
        max_new_tokens=chosen.max_new_tokens,
        temperature=chosen.temperature,
        top_k=chosen.top_k,
        top_p=chosen.top_p,
        seed=chosen.seed,
        stop=chosen.stop,
    )
    for _, piece in pieces:
        sys.stdout.write(piece)
        sys.stdout.flush()
    sys.stdout.write("\n")


def load_language_task(path: str, device: str = "cpu") -> Any:
    """The language model of a checkpoint, in eval mode.

    Raises:
        ZooError: if the file is no checkpoint, or not one of a language model.
    """
    import torch

    from zoo.identity import read_checkpoint, read_claim
    from zoo.tasks import LanguageModelTask

    checkpoint = read_checkpoint(path)
    claim = read_claim(checkpoint, path)
    task_name = f"{LanguageModelTask.__module__}.{LanguageModelTask.__qualname__}"
    if claim["task"] != task_name:
        raise ZooError(f"--ckpt: {path} was made by {claim['task']}; generate needs a language model's checkpoint")
    try:
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        raise ZooError(
            f"--device: got {device!r}, which can't be used here ({str(error).splitlines()[0]}); try cpu"
        ) from None
    task = LanguageModelTask(**claim["settings"])
    task.on_load_checkpoint(checkpoint)
    task.load_state_dict(checkpoint["state_dict"])
    return task.to(device).eval()


__all__ = ["lightning_main", "load_language_task", "zoo_main"]
