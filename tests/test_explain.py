"""Which nodes and edges mattered: the numbers are what they are said to be, and the files are written."""

import numpy as np
import pandas as pd
import pytest
import torch
from PIL import Image

from tests.tasks.test_graph import EDGES, fitted, table
from zoo.cli import zoo_main
from zoo.errors import ZooError
from zoo.explain import explain


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    task, data, trainer = fitted("multiclass", steps=60)
    folder = tmp_path_factory.mktemp("explained")
    trainer.save_checkpoint(folder / "graph.ckpt")
    frame = table()
    frame.insert(0, "sample", [f"s{i}" for i in range(len(frame))])
    frame[["sample", "a", "b", "c", "d"]].to_csv(folder / "table.csv", index=False)
    return folder, task.eval(), data


def batches(data):
    data.setup("test")
    return list(data.test_dataloader())


def test_attribution_is_gradient_times_input_by_finite_differences(saved):
    _, task, data = saved
    task = task.double()
    values = batches(data)[0]["values"][:1].double()
    nodes, _ = explain(task, [{"values": values}], "low")
    found = nodes.set_index("node")["attribution"]
    network, c, h = task.network, task.names.index("low"), 1e-6
    spec = network.spec

    def logit(scale, node):
        v, place = values.clone(), spec.nodes.index(node)

        def scale_message(module, arguments, output):
            output[0][:, place] *= scale
            return output

        if node in spec.input_nodes:
            v[:, spec.input_nodes.index(node)] *= scale
            hooks = []
        else:
            hooks = [layer.attention.register_forward_hook(scale_message) for layer in network.layers]
        with torch.no_grad():
            y = network(v)[0, c]
        for hook in hooks:
            hook.remove()
        return float(y)

    for node in spec.nodes:
        slope = (logit(1 + h, node) - logit(1 - h, node)) / (2 * h)
        # central difference: error of order h^2 times the third derivative, and rounding of 1e-16 / h
        assert found[node] == pytest.approx(slope, abs=1e-7)
    assert found.abs().max() > 1e-2
    task.float()


def test_attention_sums_to_one_at_every_node_and_layers_average(saved):
    _, task, data = saved
    _, edges = explain(task, batches(data), "low")
    for column in ("attention", "attention_1", "attention_2"):
        assert edges.groupby("target")[column].sum().to_numpy() == pytest.approx(1.0, abs=1e-5)
    assert edges["attention"].to_numpy() == pytest.approx(edges[["attention_1", "attention_2"]].mean(axis=1), abs=1e-7)
    named = set(map(tuple, EDGES.to_numpy()))
    assert {(s, t) for s, t in zip(edges["source"], edges["target"], strict=True) if s != t} == named


def test_many_batches_average_to_what_one_gives(saved):
    _, task, data = saved
    whole = torch.cat([batch["values"] for batch in batches(data)])
    together, _ = explain(task, [{"values": whole}], "high")
    apart, _ = explain(task, [{"values": row.unsqueeze(0)} for row in whole], "high")
    columns = ["attribution", "attribution_abs"]
    left, right = (frame.set_index("node").sort_index()[columns] for frame in (together, apart))
    pd.testing.assert_frame_equal(left, right, rtol=1e-4, atol=1e-6)  # float32, other batch shapes


def test_the_two_classes_of_a_binary_problem_have_opposite_attributions():
    task, data, _ = fitted("binary", steps=5)
    task.eval()
    yes, no = (explain(task, batches(data), name)[0].set_index("node")["attribution"] for name in ("yes", "no"))
    pd.testing.assert_series_equal(yes.sort_index(), -no.sort_index())


def test_inputs_that_decide_come_first(saved):
    _, task, data = saved
    nodes, _ = explain(task, batches(data), "high")
    size = nodes.set_index("node")["attribution_abs"]
    assert min(size["a"], size["c"]) > max(size["b"], size["d"]), "the label is made from a and c"


def test_missing_measurements_are_counted_out_of_the_value(saved):
    _, task, _ = saved
    values = torch.tensor([[1.0, float("nan"), 0.0, 0.0], [3.0, float("nan"), 0.0, 0.0]])
    nodes, _ = explain(task, [{"values": values}], "low")
    value = nodes.set_index("node")["value"]
    assert value["a"] == pytest.approx(2.0)
    assert np.isnan(value["b"])
    assert np.isnan(value["p"])


def test_command_writes_both_tables_and_a_picture(saved, tmp_path, capsys):
    folder, *_ = saved
    zoo_main(
        [
            *("explain", "--ckpt", str(folder / "graph.ckpt"), "--data", str(folder / "table.csv")),
            *("--target", "low", "--id-column", "sample", "--row", "s3", "--out", "nodes.csv"),
        ]
    )
    nodes, edges = pd.read_csv("nodes.csv"), pd.read_csv("nodes_edges.csv")
    assert set(nodes["node"]) == {"a", "b", "c", "d", "p", "q", "y"}
    assert len(edges) == len(EDGES) + 7
    assert min(Image.open("nodes.png").size) > 300
    assert "Nodes: nodes.csv; edges: nodes_edges.csv; picture: nodes.png" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--target", "tall"], "--target: got 'tall'; choose one of 'high', 'low', 'mid'"),
        ([], "--target: got none; choose one of 'high', 'low', 'mid'"),
        (["--target", "low", "--out", "nodes.txt"], "the file must end in .csv"),
        (["--target", "low", "--out", "nowhere/n.csv"], "there is no folder nowhere"),
        (["--target", "low", "--id-column", "sample", "--row", "s999"], "--row: got 's999'"),
        (["--target", "low", "--data", "nowhere.csv"], "nowhere.csv"),
        (["--target", "low", "--ckpt", "nowhere.ckpt"], "there is no file nowhere.ckpt"),
    ],
)
def test_mistakes_end_in_one_line_and_write_nothing(arguments, message, saved, capsys, tmp_path):
    folder, *_ = saved
    given = ["--ckpt", str(folder / "graph.ckpt"), "--data", str(folder / "table.csv"), "--out", "nodes.csv"]
    with pytest.raises(SystemExit) as ended:
        zoo_main(["explain", *given, *arguments])
    assert ended.value.code == 2
    error = capsys.readouterr().err.strip().splitlines()[-1]
    assert error.startswith("error: ")
    assert message in error
    assert not list(tmp_path.iterdir())


def test_no_samples_are_refused(saved):
    with pytest.raises(ZooError, match="got no samples"):
        explain(saved[1], [], "low")


def test_language_checkpoint_is_refused(trained, capsys):
    with pytest.raises(SystemExit):
        zoo_main(["explain", "--ckpt", str(trained), "--out", "n.csv"])
    assert "this command needs one of GraphPredictionTask" in capsys.readouterr().err
