"""The two console scripts: ``lightning`` trains, tests and predicts; ``zoo`` uses what was trained."""

import argparse
import io
import json
import os
import sys
from collections.abc import Callable, Sequence
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, cast

from zoo.errors import ZooError, listed

if TYPE_CHECKING:
    from zoo.checkpoint import Checkpoint
    from zoo.tasks import ZooTask

Task = TypeVar("Task", bound="ZooTask")


def one_line(run: Callable[[], object]) -> None:
    """Run; end a user's mistake in one line on standard error and exit code 2."""
    try:
        run()
    except BrokenPipeError:  # the reader (head, less) has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise SystemExit(1) from None
    except KeyboardInterrupt:
        raise SystemExit(130) from None
    except OSError as error:  # no permission, no room, a folder in place of a file
        where = f" {error.filename}" if error.filename else ""
        print(
            f"error: can't use{where}: {error.strerror or error}; check the path, its permissions and the room",
            file=sys.stderr,
        )
        raise SystemExit(2) from None
    except Exception as error:
        from lightning.fabric.utilities.exceptions import MisconfigurationException  # takes seconds: not for --help

        cause: BaseException | None = error
        while cause is not None and not isinstance(cause, (ZooError, MisconfigurationException)):
            cause = cause.__cause__  # jsonargparse wraps what a constructor raises
        if cause is None:
            raise
        text = str(cause)
        if text.startswith("Caught "):  # in a loader's process, whose traceback PyTorch puts into the message
            text = text.rstrip().splitlines()[-1].partition(": ")[2]
        print(f"error: {' '.join(text.split())}", file=sys.stderr)
        raise SystemExit(2) from None


# ---------------------------------------------------------------------- lightning


def lightning_main() -> None:
    """Entry point of ``lightning`` and of ``python -m zoo``."""
    from zoo.cli.lightning import ZooCLI

    one_line(ZooCLI)


# ---------------------------------------------------------------------- zoo


def zoo_main(args: Sequence[str] | None = None) -> None:
    """Entry point of ``zoo``."""
    parser = argparse.ArgumentParser(
        prog="zoo", description="Use trained models of the zoo. To train one: lightning fit --config configs/..."
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    _add_generate(commands)
    _add_explain(commands)
    _add_inspect(commands)
    _add_list(commands)
    _add_show(commands)
    _add_verify(commands)
    _add_export(commands)
    _add_import(commands)
    _add_config(commands)
    _add_attentions(commands)
    _add_study(commands)
    chosen = parser.parse_args(args)
    one_line(lambda: chosen.run(chosen))


def _add_generate(commands: Any) -> None:
    generate = commands.add_parser(
        "generate",
        help="continue a text",
        description="Continue a text with a trained language model, printing it as it is made.",
    )
    generate.add_argument(
        "--ckpt",
        required=True,
        metavar="FILE|NAME",
        help="the checkpoint, or a name of zoo list; nothing else is needed",
    )
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
    from zoo.tasks import LanguageModelTask

    task = load_task(chosen.ckpt, LanguageModelTask, chosen.device)
    prompt = sys.stdin.read() if chosen.prompt == "-" else chosen.prompt
    pieces = task.stream(
        [prompt],
        max_new_tokens=chosen.max_new_tokens,
        temperature=chosen.temperature,
        top_k=chosen.top_k,
        top_p=chosen.top_p,
        seed=chosen.seed,
        stop=chosen.stop,
    )
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # a terminal that lacks a character is no reason to stop
    first = next(pieces, None)  # what is refused is refused before anything is printed
    sys.stdout.write(prompt)
    for _, piece in chain([] if first is None else [first], pieces):
        sys.stdout.write(piece)
        sys.stdout.flush()
    sys.stdout.write("\n")


def _add_explain(commands: Any) -> None:
    explain = commands.add_parser(
        "explain",
        help="which nodes and edges of a graph mattered",
        description="Write which nodes and edges mattered to a graph model's predictions: a table of nodes (gradient x "
        "input, averaged over the rows), beside it a table of edges (attention) and a picture of the graph.",
    )
    explain.add_argument("--ckpt", required=True, metavar="FILE|NAME", help="the checkpoint, or a name of zoo list")
    explain.add_argument(
        "--data", metavar="FILE", help="table with the rows to explain; default: the checkpoint's own test rows"
    )
    explain.add_argument("--out", required=True, metavar="NODES.csv", help="also writes NODES_edges.csv and NODES.png")
    explain.add_argument("--target", metavar="NAME", help="class to explain; needed where there are more than two")
    explain.add_argument("--id-column", metavar="NAME", help="column that names the rows")
    explain.add_argument("--row", action="append", default=[], metavar="ID", help="only this row; may be repeated")
    explain.add_argument("--device", default="cpu", help="where to run, such as cpu or cuda; default: %(default)s")
    explain.set_defaults(run=_explain)


def _explain(chosen: argparse.Namespace) -> None:
    from datamodules.tables import GraphTableDataModule
    from zoo.checkpoint import Checkpoint
    from zoo.explain import draw, explain
    from zoo.tasks import GraphPredictionTask

    out = Path(chosen.out)
    if out.suffix != ".csv":
        raise ZooError(f"--out: got {chosen.out!r}; the file must end in .csv")
    if not out.parent.is_dir():
        raise ZooError(f"--out: there is no folder {out.parent}; make it first")
    if chosen.data is not None and Path(chosen.data).resolve() == out.resolve():
        raise ZooError(f"--out: got {chosen.out!r}, which is the table itself; name another file")
    checkpoint = Checkpoint.open(chosen.ckpt)
    task = load_task(checkpoint, GraphPredictionTask, chosen.device)
    settings = checkpoint.data_settings | GraphTableDataModule.as_in_checkpoint(checkpoint.path)
    if chosen.data is not None:
        settings |= {"predict_features": chosen.data, "unmatched_columns": "ignore"}
    if chosen.id_column is not None:
        settings["id_column"] = chosen.id_column
    data = GraphTableDataModule(**settings)
    data.prepare_data()
    data.setup("predict")
    batches = list(data.predict_dataloader())
    if chosen.row:
        known = {name for batch in batches for name in batch["id"]}
        if unknown := [row for row in chosen.row if row not in known]:
            raise ZooError(f"--row: got {listed(unknown)}; the table has {listed(sorted(known))}")
        places = [[i for i, name in enumerate(batch["id"]) if name in chosen.row] for batch in batches]
        batches = [{"values": batch["values"][p]} for batch, p in zip(batches, places, strict=True) if p]
    nodes, edges = explain(task, batches, chosen.target)
    edges_file, picture = out.with_name(f"{out.stem}_edges.csv"), out.with_suffix(".png")
    nodes.to_csv(out, index=False)
    edges.to_csv(edges_file, index=False)
    draw(task, nodes, edges, picture)
    print(nodes.head(10).to_string(index=False))
    print(f"Nodes: {out}; edges: {edges_file}; picture: {picture}")


def _add_inspect(commands: Any) -> None:
    inspect = commands.add_parser(
        "inspect",
        help="look inside a trained model",
        description="Look inside a trained model of any family: write to a folder, as CSV and PNG, the attention maps "
        "of a sample by layer and head, how alike heads are, the metric with its blocks and spectrum, gates, loads and "
        "coefficients where the attention has them, and the held-out loss without some of the metric's blocks.",
    )
    inspect.add_argument("ckpt", metavar="NAME|FILE|ADDRESS", help="a name, see zoo list, or a checkpoint")
    inspect.add_argument("--out", required=True, metavar="FOLDER", help="folder to write")
    inspect.add_argument("--overwrite", action="store_true", help="write to a folder that is there")
    inspect.add_argument(
        "--data",
        metavar="PATH",
        help="held-out data: text, a folder of pictures, or a table; default: the checkpoint's own test split",
    )
    inspect.add_argument(
        "--config", metavar="CONFIG.yaml", help="a config whose data section goes before the checkpoint's"
    )
    inspect.add_argument(
        "--sample",
        type=int,
        default=0,
        metavar="N",
        help="the held-out sample to look at, from 0; default: %(default)s",
    )
    inspect.add_argument("--text", metavar="TEXT", help="look at this text instead; of a language model")
    inspect.add_argument(
        "--tokens", type=int, default=48, metavar="N", help="of a text, how many to look at; default: %(default)s"
    )
    inspect.add_argument(
        "--layer", type=int, action="append", default=[], metavar="N", help="only this layer, from 0; may be repeated"
    )
    inspect.add_argument(
        "--batches",
        type=int,
        default=16,
        metavar="N",
        help="held-out batches to measure each loss on; 0 measures none; default: %(default)s",
    )
    inspect.add_argument("--device", default="cpu", help="where to run, such as cpu or cuda; default: %(default)s")
    inspect.set_defaults(run=_inspect)


def _inspect(chosen: argparse.Namespace) -> None:
    from zoo.cli.lightning import quiet_advertisements
    from zoo.inspection import inspect_checkpoint

    quiet_advertisements()
    check_device(chosen.device)
    names = ("data", "config", "sample", "text", "tokens", "batches", "device", "overwrite")
    given = {name: getattr(chosen, name) for name in names}
    found = inspect_checkpoint(chosen.ckpt, chosen.out, layers=chosen.layer, **given)
    print(f"Looked at {found.sample}. Means over heads, by layer:")
    by_layer = found.by_layer()
    print(by_layer.to_string(float_format=lambda value: f"{value:.4g}", na_rep=""))
    if found.ablation is not None:
        print("\nHeld-out figures with some blocks of the metric:")
        print(found.ablation.to_string(index=False, float_format=lambda value: f"{value:.4g}"))
    if found.note:
        print(f"\n{found.note}")
    print(f"\n{chosen.out}: {', '.join(found.files)}")


def _add_list(commands: Any) -> None:
    listing = commands.add_parser("list", help="what trained models there are", description="List the trained models.")
    listing.add_argument("--family", metavar="NAME", help="only these: language, vision or graph")
    listing.add_argument("--json", action="store_true", help="all that the index says, as JSON")
    listing.set_defaults(run=_list)


def _list(chosen: argparse.Namespace) -> None:
    from zoo.checkpoint.index import read_index

    entries = [entry for entry in read_index().values() if chosen.family in (None, entry.family)]
    if chosen.family is not None and not entries:
        from zoo.families import FAMILIES

        FAMILIES.get(chosen.family, "--family")
    if chosen.json:
        print(json.dumps([entry.to_dict() for entry in entries], indent=2, ensure_ascii=False))
        return
    width = max((len(entry.name) for entry in entries), default=0)
    for entry in entries:
        figure = entry.metrics[0]
        print(
            f"{entry.name:{width}}  {entry.family:8}  {entry.parameters / 1e6:5.2f} M  "
            f"{figure['split']} {figure['name']} {figure['value']:.4g}  {entry.summary}"
        )


def _add_show(commands: Any) -> None:
    show = commands.add_parser("show", help="the card of a trained model", description="Print a model's card.")
    show.add_argument("name", metavar="NAME", help="its name, see zoo list")
    show.set_defaults(run=_show)


def _show(chosen: argparse.Namespace) -> None:
    from zoo.checkpoint.index import companion, entry_of, whereabouts

    entry = entry_of(chosen.name)
    print(companion(entry, entry.card).read_text(encoding="utf-8").rstrip())
    print(f"\nFile: {whereabouts(entry)} ({entry.bytes / 1e6:.1f} MB, SHA-256 {entry.sha256})")


def _add_verify(commands: Any) -> None:
    verify = commands.add_parser(
        "verify",
        help="check trained models",
        description="Check that a trained model is what the index says: its file's SHA-256, the identity of its data, "
        "and that it loads. A checkpoint file that isn't on the shelf is checked against itself.",
    )
    verify.add_argument("names", nargs="*", metavar="NAME|FILE|ADDRESS", help="names, see zoo list, or checkpoints")
    verify.add_argument("--all", action="store_true", help="every model on the shelf")
    verify.add_argument("--metrics", action="store_true", help="also measure the test figures again; takes minutes")
    verify.set_defaults(run=_verify)


def _verify(chosen: argparse.Namespace) -> None:
    from zoo.catalogue import check_metrics, verify, verify_file
    from zoo.checkpoint.index import entry_of, read_index
    from zoo.checkpoint.remote import is_address
    from zoo.cli.lightning import quiet_advertisements

    if chosen.all == bool(chosen.names):
        raise ZooError("verify: give names, or --all")
    for name in read_index() if chosen.all else chosen.names:
        if is_address(name) or Path(name).suffix or os.sep in name or Path(name).is_file():
            if chosen.metrics:
                raise ZooError(f"--metrics: {name} is a file, and only the index has figures to compare; give a name")
            print(f"{name}: {', '.join(verify_file(name))}")
            continue
        entry = entry_of(name)
        checked = verify(entry)
        if chosen.metrics:
            quiet_advertisements()
            checked += check_metrics(entry)
        print(f"{name}: {', '.join(checked)}", flush=True)


def _add_config(commands: Any) -> None:
    config = commands.add_parser(
        "config",
        help="print a config to start from",
        description="Print a config that ships, or the one that a trained model was made with: zoo config NAME > "
        "mine.yaml, then lightning fit --config mine.yaml. Without a name, list them.",
    )
    config.add_argument("name", nargs="?", metavar="NAME", help="of this list, or of zoo list")
    config.set_defaults(run=_config)


def _config(chosen: argparse.Namespace) -> None:
    from zoo.configs import config_files, find_config, read_config, summary

    if chosen.name is not None:
        sys.stdout.write(read_config(find_config(chosen.name)))
        return
    files = config_files()
    width = max(map(len, files), default=0)
    for name, file in files.items():
        print(f"{name:{width}}  {summary(file)}")


def _add_attentions(commands: Any) -> None:
    attentions = commands.add_parser(
        "attentions",
        help="what attentions there are",
        description="List the attentions that language models and vision transformers can be made with, or describe "
        "one and its options. Train with one: lightning fit --config configs/... --model.attention NAME "
        "--model.attention_options '{option: value}'.",
    )
    attentions.add_argument("name", nargs="?", metavar="NAME", help="describe this one")
    attentions.set_defaults(run=_attentions)


def _attentions(chosen: argparse.Namespace) -> None:
    from zoo.attention.describe import describe, describe_all

    print(describe_all() if chosen.name is None else describe(chosen.name, "name"))


def _add_export(commands: Any) -> None:
    export = commands.add_parser(
        "export",
        help="write a trained model in another format",
        description="Write a trained model in another format, and check that what was written is the same model.",
    )
    export.add_argument("name", metavar="NAME|FILE|ADDRESS", help="a name, see zoo list, or a checkpoint")
    export.add_argument(
        "--to",
        required=True,
        metavar="FORMAT",
        help="safetensors, onnx, torch-export, hub-folder (model.safetensors, config.json and README.md as the Hugging "
        "Face hub and timm read them), or checkpoint (weights alone, adapters merged)",
    )
    export.add_argument("--out", required=True, metavar="PATH", help="file or folder to write")
    export.add_argument("--overwrite", action="store_true", help="replace it if it is there")
    export.set_defaults(run=_export)


def _export(chosen: argparse.Namespace) -> None:
    from zoo.exchange import export_model

    done = export_model(chosen.name, chosen.to, chosen.out, chosen.overwrite)
    print(f"{chosen.out}: {', '.join(done)}")


def _add_import(commands: Any) -> None:
    importing = commands.add_parser(
        "import",
        help="make a checkpoint from weights in another file",
        description="Make a checkpoint from weights in another file: a .safetensors file, a folder of zoo export --to "
        "hub-folder, or a file of torch.save with a state dict. What zoo export wrote says itself what it is; of "
        "other weights, --like or --config says it.",
    )
    importing.add_argument("weights", metavar="WEIGHTS", help="the file or folder")
    importing.add_argument("--out", required=True, metavar="FILE.ckpt", help="checkpoint to write")
    importing.add_argument("--like", metavar="NAME|FILE", help="a checkpoint whose weights these replace")
    importing.add_argument("--config", metavar="CONFIG.yaml", help="model and data, as lightning fit takes it")
    importing.add_argument("--overwrite", action="store_true", help="replace it if it is there")
    importing.set_defaults(run=_import)


def _import(chosen: argparse.Namespace) -> None:
    from zoo.cli.lightning import quiet_advertisements, read_classes
    from zoo.exchange import import_weights

    quiet_advertisements()
    made_for = None if chosen.config is None else read_classes(chosen.config)
    done = import_weights(chosen.weights, chosen.out, chosen.like, made_for, chosen.overwrite)
    print(f"{chosen.out}: {', '.join(done)}")


def _add_study(commands: Any) -> None:
    study = commands.add_parser(
        "study",
        help="does it help: arms tuned alike, repeated, with intervals",
        description="Run the study that a file describes, or what is missing of it: every arm is tuned over the same "
        "learning rates, run with several seeds, and compared with the reference in pairs. It may be stopped and "
        "started again at any moment, and several processes may work on one study. Ends by writing the report: "
        "report.md, report.html, results.csv, runs.csv and figures.",
    )
    study.add_argument("study", metavar="STUDY.yaml", help="what to compare; see docs/studies.md")
    study.add_argument("--report", action="store_true", help="write the report of what there is, and run nothing")
    study.add_argument(
        "--dry-run",
        action="store_true",
        help="measure the arms, print every run with its command and time; train nothing",
    )
    study.add_argument("--jobs", type=int, default=1, metavar="N", help="runs at once; default: %(default)s")
    study.add_argument("--threads", type=int, metavar="M", help="threads of each run; default: PyTorch's")
    study.add_argument("--out", metavar="FOLDER", help="where runs and report go; default: runs/studies/STUDY")
    study.add_argument(
        "--storage", metavar="URL", help="database of the runs, as SQLAlchemy names it; default: study.db in --out"
    )
    study.set_defaults(run=_study)


def _study(chosen: argparse.Namespace) -> None:
    from zoo.cli.study import study

    study(chosen)


def load_task(given: "str | Checkpoint", kind: type[Task], device: str = "cpu") -> Task:
    """The task of a checkpoint, in eval mode.

    Raises:
        ZooError: if it can't be opened, or is one of another family.
    """
    from zoo.catalogue import load_pretrained
    from zoo.checkpoint import Checkpoint

    checkpoint = Checkpoint.open(given)
    if checkpoint.task != f"{kind.__module__}.{kind.__qualname__}":
        raise ZooError(
            f"{checkpoint.path} was made by {checkpoint.task}; this command needs one of {kind.__qualname__}",
            argument="--ckpt",
        )
    check_device(device)
    task = load_pretrained(checkpoint)
    task.to(device)
    return cast(Task, task)


def check_device(device: str) -> None:
    """Raise ZooError unless ``--device`` is one that can be used here."""
    import torch

    try:
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        reason = str(error).splitlines()[0]
        raise ZooError(f"--device: got {device!r}, which can't be used here ({reason}); try cpu") from None
