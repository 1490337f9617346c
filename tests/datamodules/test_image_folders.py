"""Folders of pictures and CSV files that name them: read as what they are, or refused; nothing is left out unsaid."""

import os
import shutil
import unicodedata
import warnings

import numpy as np
import pytest
import torch
from PIL import Image

import datamodules.image_files
from datamodules.image_files import find_twins
from datamodules.image_folders import find_classes, find_labelled, split_words
from datamodules.images import ImageDataModule
from zoo.checkpoint.identity import digest
from zoo.errors import CheckpointMismatchError, ZooError

NFC = "é"
NFD = unicodedata.normalize("NFD", NFC)


def put(folder, *names):
    """Files that are pictures by name, each of its own size and bytes."""
    for i, name in enumerate(names):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(b"x" * i + b"y")
    return folder


def tree(folder, places, n=1):
    """``n`` such files in each of some folders; of a folder that ends in a slash, the folder alone."""
    for place in places:
        (folder / place).mkdir(parents=True, exist_ok=True)
    put(folder, *(f"{place}/{i}.png" for place in places if not place.endswith("/") for i in range(n)))
    return folder


def paint(folder, names, seed=0, size=(12, 12)):
    """Pictures that can be read, no two alike."""
    random = np.random.default_rng(seed)
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(random.integers(0, 256, (*size, 3), dtype=np.uint8)).save(folder / name)
    return folder


def painted(folder, counts, **options):
    return paint(folder, [f"{place}/{i:02}.png" for place, n in counts.items() for i in range(n)], **options)


def ready(path, stage="fit", **options):
    data = ImageDataModule(path=str(path), image_size=8, **options)
    data.prepare_data()
    data.setup(stage)
    return data


def save_checkpoint(path, data):
    claim = {
        "identity": data.identity(),
        "digest": digest(data.identity()),
        "task": "zoo.tasks.graph.GraphPredictionTask",  # which task it is doesn't matter here
        "settings": {},
        "data": {"class_path": "datamodules.images.ImageDataModule", "init_args": dict(data.hparams)},
        "step_seed": 0,
    }
    torch.save({"zoo": claim, "state_dict": {}}, path)
    return str(path)


def refusal(call, *args, **options):
    with pytest.raises(ZooError) as raised:
        call(*args, **options)
    message = str(raised.value)
    assert "\n" not in message
    return message


def places_of(pictures):
    """{split: {class: folders}}, the split being None where there are none."""
    found = {}
    for i, name in enumerate(pictures.ids):
        split = None if pictures.splits is None else ("train", "val", "test")[pictures.splits[i]]
        label = pictures.classes[pictures.targets[i]]
        found.setdefault(split, {}).setdefault(label, set()).add(name.rpartition("/")[0])
    return found


# ---------------------------------------------------------------------- which folders are splits


@pytest.mark.parametrize(
    ("names", "word"),
    [
        (("train", "Train", "TRAIN", "seg_train", "train_set", "trainset", "train-images", "Images Train"), "train"),
        (("train2017", "01_train", "train.data", "imgs_train", "train\u200b", " train "), "train"),
        (("training", "Training", "training_set", "training-data"), "training"),
        (("val", "VAL", "val_images", "valset", "val2017"), "val"),
        (("valid", "Valid_Set"), "valid"),
        (("validation", "validation set", "Validation-Images"), "validation"),
        (("dev", "dev_set"), "dev"),
        (("test", "seg_test", "test_set", "testset", "TestImages", "test1"), "test"),
        (("testing", "Testing"), "testing"),
        (("holdout", "hold-out", "hold_out_set"), "holdout"),
        (("eval", "eval_set"), "eval"),
        (("evaluation", "Evaluation"), "evaluation"),
        (("bullet train", "trains", "contest", "testis", "valley", "Device", "devil", "trainer", "", "data"), None),
        (("cat", "unlabelled", "predict", "seg_pred", "extra", "vali", "evaluation board", "日本"), None),
    ],
)
def test_names_of_splits_are_known_with_what_is_put_around_them(names, word):
    found = {name: split_words([name]) for name in names}
    assert found == {name: {name: word} if word else {} for name in names}


def test_a_longer_name_is_a_splits_beside_its_like():
    both = {"birds_train": "train", "birds_test": "test", "train": "train"}
    assert split_words([*both, "dogs_test", "bullet train", "night train"]) == both
    assert [*split_words(["ILSVRC2012_img_train", "ILSVRC2012_img_val"]).values()] == ["train", "val"]
    assert split_words(["train birds", "birds test"]) == {}, "these are called in two ways"
    assert split_words(["train_test", "val_test"]) == {}


def split_tree(train=None, val=None, test=None):
    """The places, and what is to be found in them."""
    named = {"train": train, "val": val, "test": test}
    places = [f"{place}/{label}" for place in named.values() if place for label in ("ant", "bee")]
    expected = {
        split: {label: {f"{place}/{label}"} for label in ("ant", "bee")} for split, place in named.items() if place
    }
    return places, expected


@pytest.mark.parametrize(
    "named",
    [
        {"train": "Training", "test": "Testing"},
        {"train": "seg_train", "test": "seg_test"},
        {"train": "train_set", "test": "test_set"},
        {"train": "train", "val": "validation", "test": "evaluation"},
        {"train": "train", "val": "dev", "test": "test"},
        {"train": "train", "val": "eval", "test": "test"},
        {"train": "Train", "val": "VAL"},
        {"train": "train-images", "val": "val-images", "test": "test-images"},
        {"train": "train", "test": "hold-out"},
        {"train": "birds_train", "val": "birds_val", "test": "birds_test"},
        {"train": "alphabet_train/alphabet_train", "test": "alphabet_test/alphabet_test"},
        {"train": "seg_train/seg_train", "test": "seg_test/seg_test"},
    ],
)
def test_folders_of_splits_are_never_classes(tmp_path, named):
    places, expected = split_tree(**named)
    assert places_of(find_classes(str(tree(tmp_path / "zoo", places)))) == expected


@pytest.mark.parametrize(
    ("places", "expected"),
    [
        # a split's name is a class's where the folder holds pictures
        (("train", "test", "boat"), {"train", "test", "boat"}),
        (("train", "test"), {"train", "test"}),
        (("dev", "holdout", "eval"), {"dev", "holdout", "eval"}),
        # what classes are divided into is up to them
        (("Quercus/robur", "Quercus/alba", "Fagus/sylvatica", "Acer"), {"Quercus", "Fagus", "Acer"}),
        (("Quercus/alba", "Quercus/nigra", "Quercus/robur", "Pinus/nigra", "Pinus/alba", "Pinus/pinea"), None),
        (("cat/images", "dog/images"), {"cat", "dog"}),
        (("cat/images", "cat/more", "dog"), {"cat", "dog"}),
        (("cat", "cat/front", "cat/back", "dog/front", "dog/back"), {"cat", "dog"}),
        (("bullet train/a", "bullet train/b", "night train/c", "night train/d"), {"bullet train", "night train"}),
    ],
)
def test_folders_that_hold_pictures_stay_classes(tmp_path, places, expected):
    expected = expected or {place.partition("/")[0] for place in places}
    pictures = find_classes(str(tree(tmp_path / "zoo", places)))
    assert pictures.splits is None
    assert set(pictures.classes) == expected


def pairs(*outer, inner=("cat", "dog")):
    return tuple(f"{place}/{label}" for place in outer for label in inner)


@pytest.mark.parametrize(
    ("places", "message"),
    [
        (pairs("fold1", "fold2", "fold3"), "'fold1', 'fold2', 'fold3' in {} all hold the folders 'cat', 'dog'; if"),
        ((*pairs("A", "B", inner="abc"), "A/d"), "'A', 'B' in {} all hold the folders 'a', 'b', 'c'; if these are"),
        (pairs("flowers_train", "test_of_it"), "'flowers_train', 'test_of_it' in {} all hold the folders 'cat', 'dog'"),
        (pairs("cat", "dog", inner=("train", "test")), "'cat' in {} holds 'test', 'train', as the folders of splits"),
        (("cat/train", "cat/test", "dog/train"), "'cat' in {} holds 'test', 'train', as the folders of splits are"),
        ((*pairs("train"), "boat"), "{} has 'train', which holds folders as a split does, beside 'boat'; if the"),
        ((*pairs("train"), "test", "boat"), "{} has 'train', which holds folders as a split does, beside 'boat', 't"),
        (pairs("test", "unlabelled"), "beside 'unlabelled'; if the classes are in it, name {}/test or take the"),
        (pairs("train", "eval"), "{} has 'eval', 'train', and 'eval' may be for validation or for the test; rename"),
        (pairs("evaluation"), "'evaluation' may be for validation or for the test; rename it val or test"),
        (pairs("train", "val", "test", "eval"), "{} has 'eval', 'test', 'train', 'val', two of them for the same"),
        (pairs("train", "val", "validation"), "{} has 'train', 'val', 'validation', two of them for the same split"),
        (pairs("train", "Train", "test"), "{} has 'Train', 'test', 'train', two of them for the same split; leave"),
        (pairs("train", "dev", "val"), "two of them for the same split; leave one"),
        ((*pairs("train", "test"), "val/"), "has class folders in 'test', 'train', but none in 'val'; give each the"),
        ((*pairs("train", "val"), "test"), "has class folders in 'train', 'val', but none in 'test'; give each"),
        (pairs("mine/train", "mine/test"), "{} has one class folder, 'mine', and that holds 'test', 'train'; name {}"),
        (pairs("mine"), "{} has one class folder, 'mine', and that holds 'cat', 'dog'; name {}/mine with data.path"),
        (pairs("a/b/train", "a/b/test"), "one class folder, 'a/b', and that holds 'test', 'train'; name {}/a/b with"),
        (pairs("train/all", "test/all"), "one class folder, 'test/all', and that holds 'cat', 'dog'; put what is in"),
        (("cat", "dog", "labels/", "annotations/"), "2 class folders in {} hold no picture: 'annotations', 'labels'"),
        (("train/cat", "train/dog", "test/cat", "test/dog/"), "1 class folders in {} hold no picture: 'test/dog'"),
    ],
)  # fmt: skip
def test_folders_that_may_be_classes_or_splits_are_refused(tmp_path, places, message):
    root = tree(tmp_path / "zoo", places)
    found = refusal(find_classes, str(root))
    assert found.startswith("data.path: ")
    assert message.replace("{}", str(root)) in found


@pytest.mark.parametrize("places", [pairs("fold1", "fold2"), (*pairs("train"), "boat"), pairs("mine")])
def test_folders_are_classes_where_a_checkpoint_knows_them_as_such(tmp_path, places):
    root = str(tree(tmp_path / "zoo", places))
    outer = {place.partition("/")[0] for place in places}
    assert set(find_classes(root, [*outer, "more"]).classes) == outer
    refusal(find_classes, root, [*outer][1:])


def test_what_is_left_out_or_taken_otherwise_is_named(tmp_path, caplog):
    root = tree(tmp_path / "zoo", [*pairs("train", "val", "test"), "unlabelled", "predict/cat"])
    put(root, "top.png", "train/x.png", "test/y.png", "train/cat/tabby/z.png")
    with caplog.at_level("INFO"):
        pictures = find_classes(str(root))
    assert len(pictures) == 7
    assert f"'predict', 'unlabelled' in {root} are beside the folders of splits, and left out" in caplog.text
    outside = "'top.png', 'test/y.png', 'train/x.png'"
    assert f"3 pictures in {root} lie in no class folder and are left out: {outside}" in caplog.text
    assert "1 pictures" in caplog.text
    assert "are of the outer one's class: 'train/cat/tabby/z.png' of 'cat'" in caplog.text
    assert sum(record.levelname == "INFO" for record in caplog.records) == 3, "one line a kind"


def test_classes_that_are_called_like_splits_are_said(tmp_path):
    with pytest.warns(UserWarning, match=r"'test', 'train' in .* are taken for classes, as they hold pictures and no"):
        find_classes(str(tree(tmp_path / "two", ["train", "test"])))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        find_classes(str(tree(tmp_path / "one", ["train", "boat"])))


def test_what_a_notebook_and_an_archive_leave_behind_is_no_picture(tmp_path):
    root = tree(tmp_path / "zoo", ["cat", "dog", "cat/.ipynb_checkpoints", ".ipynb_checkpoints", "__MACOSX/cat"])
    put(root, "cat/._0.png", "dog/.thumb.jpg", "dog/Thumbs.db")
    assert find_classes(str(root)).ids == ["cat/0.png", "dog/0.png"]


# ---------------------------------------------------------------------- names that look the same

ALIKE = [
    (f"caf{NFC}", f"caf{NFD}", ["'caf<U+00E9>'", "'cafe<U+0301>'"]),
    ("ant", "ant\u200b", ["'ant'", "'ant<U+200B>'"]),
    ("ant", "ant ", ["'ant'", "'ant '"]),
    ("ant", "\u0430nt", ["'ant'", "'<U+0430>nt'"]),
]


@pytest.mark.parametrize(("one", "two", "shown"), ALIKE)
def test_class_folders_that_look_the_same_are_refused(tmp_path, one, two, shown):
    root = tree(tmp_path / "zoo", [one, two, "bee"])
    split = tree(tmp_path / "split", [f"train/{one}", "train/bee", f"test/{two}", "test/bee"])
    for folder in (root, split):
        found = refusal(find_classes, str(folder))
        assert f"data.path: class folders in {folder} look the same and differ: " in found
        assert all(name in found for name in shown)


@pytest.mark.parametrize(("one", "two", "shown"), ALIKE[:2] + ALIKE[3:])
def test_labels_that_look_the_same_are_refused(tmp_path, one, two, shown):
    root = put(tmp_path / "zoo", "a.png", "b.png")
    (root / "labels.csv").write_text(f"path,label\na.png,{one}\nb.png,{two}\n", encoding="utf-8")
    found = refusal(find_labelled, str(root), str(root / "labels.csv"))
    assert "labels.csv: labels look the same and differ: " in found
    assert all(name in found for name in shown)


def test_a_class_that_looks_like_one_of_the_checkpoints_is_refused_with_its_spelling(tmp_path):
    data = ready(painted(tmp_path / "zoo", {f"caf{NFC}": 4, "bee": 4}))
    checkpoint = save_checkpoint(tmp_path / "model.ckpt", data)
    other = painted(tmp_path / "other", {f"caf{NFD}": 2, "bee": 2})
    with pytest.raises(CheckpointMismatchError) as raised:
        ready(other, "test", from_checkpoint=checkpoint)
    for part in ("here and in the checkpoint look the same and differ", "'cafe<U+0301>' and 'caf<U+00E9>'"):
        assert part in str(raised.value)


# ---------------------------------------------------------------------- CSV files


def labelled(tmp_path, content):
    root = put(tmp_path / "zoo", *(f"{label}/{i}.png" for label in ("ant", "bee") for i in range(3)))
    (tmp_path / "labels.csv").write_bytes(content if isinstance(content, bytes) else content.encode())
    return str(root), str(tmp_path / "labels.csv")


@pytest.mark.parametrize(
    "content",
    [
        b"\xef\xbb\xbfpath,label\nant/0.png,x\nbee/0.png,y\n",
        "path , label\nant/0.png, x\nbee/0.png ,y \n",
        '"path","label"\r\n"ant/0.png","x"\r\n"bee/0.png","y"\r\n',
        "\npath,label,,\nant/0.png,x,,\n\nbee/0.png,y,,\n",
        "note,note,label,path\na,b,x,ant/0.png\nc,d,y,bee/0.png\n",
    ],
)
def test_what_programs_write_around_cells_does_not_matter(tmp_path, content):
    pictures = find_labelled(*labelled(tmp_path, content))
    assert pictures.classes == ["x", "y"]
    assert pictures.ids == ["ant/0.png", "bee/0.png"]
    assert pictures.targets.tolist() == [0, 1]


def test_labels_are_the_text_they_are(tmp_path):
    labels = ["001", "1", "01", "1.0", "1E1", "TRUE", "True", "NA", "nan", "None", "null", "N/A", "0", "-", "inf"]
    root = put(tmp_path / "zoo", *(f"{i}.png" for i in range(len(labels))))
    rows = "".join(f"{i}.png,{label}\n" for i, label in enumerate(labels))
    (tmp_path / "labels.csv").write_text("path,label\n" + rows)
    pictures = find_labelled(str(root), str(tmp_path / "labels.csv"))
    assert {name: pictures.classes[i] for name, i in zip(pictures.ids, pictures.targets, strict=True)} == {
        f"{i}.png": label for i, label in enumerate(labels)
    }


GOOD = "path,label\nant/0.png,x\nbee/0.png,y\n"


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("path,label,label\nant/0.png,x,y\n", "has 2 columns 'label'; leave the one that is meant"),
        ("path,label,label \nant/0.png,x,y\n", "has 2 columns 'label'"),
        ("path,path,label\nant/0.png,bee/0.png,y\n", "has 2 columns 'path'"),
        ("path,label,split,split\nant/0.png,y,train,test\n", "has 2 columns 'split'"),
        ("path,label,label\u200b\nant/0.png,x,y\n", "columns look the same and differ: 'label' and 'label<U+200B>'"),
        ("path,label\u200b\nant/0.png,x\n", "has no column 'label' (it has 'path', 'label<U+200B>'); give it"),
        ("Path,Label\nant/0.png,x\n", "has no column 'path', 'label' (it has 'Path', 'Label'); give it"),
        (GOOD.replace(",", ";"), "is separated by ';', as spreadsheets write"),
        (GOOD.replace(",", "\t"), r"is separated by '\t'; separate it by ','"),
        (GOOD.replace(",", ";") + "bee/1.png;a, b\n", "is separated by ';', as spreadsheets write"),
        (GOOD.encode("utf-16"), "is UTF-16, not UTF-8; convert it"),
        (GOOD.encode("utf-16-be"), "looks like UTF-16 without a mark, not UTF-8; convert it"),
        (
            "path,label\nant/0.png,é\n".encode("latin-1"),
            "has bytes that are no UTF-8, the first at offset 21",
        ),
        ('path,label\nant/0.png,"x\n', "is no readable CSV"),
        ("path,label,split\nant/0.png,x,tr\u0430in\n", "column 'split' has 'tr<U+0430>in' in row 1 below the header"),
        ("path,label,split\nant/0.png,x,train\u200b\n", "column 'split' has 'train<U+200B>' in row 1 below the header"),
        (
            "path,label,split\nant/0.png,x,Train\n",
            "column 'split' has 'Train' in row 1 below the header; it must be tr",
        ),
        ("path,label\nant/0.png,x\nant,y\n", "names 1 files that aren't below"),
    ],
)
def test_csv_files_are_refused_by_what_is_wrong_with_them(tmp_path, content, message):
    root, labels = labelled(tmp_path, content)
    found = refusal(find_labelled, root, labels)
    assert found.startswith(f"data.labels: {labels}")
    assert message in found


@pytest.mark.parametrize(
    ("file", "named", "shown"),
    [
        ("ant/0.png", r"ant\0.png", r"'ant/0.png' for 'ant\0.png'"),
        (f"{NFC}/0.png", f"{NFD}/0.png", "'<U+00E9>/0.png' for 'e<U+0301>/0.png'"),
        ("ant/0.png", "Ant/0.PNG", "'ant/0.png' for 'Ant/0.PNG'"),
        ("ant/0.png", "ant/0", "'ant/0.png' for 'ant/0'"),
        ("ant/0.png", "ant/\u200b0.png", "'ant/0.png' for 'ant/<U+200B>0.png'"),
    ],
)
def test_files_that_are_there_in_another_spelling_are_shown(tmp_path, file, named, shown):
    root = put(tmp_path / "zoo", file)
    (tmp_path / "labels.csv").write_text(f"path,label\n{named},x\nnone.png,y\n", encoding="utf-8")
    found = refusal(find_labelled, str(root), str(tmp_path / "labels.csv"))
    assert "names 2 files that aren't below" in found
    assert f"1 of them are there in another spelling, such as {shown}: write paths as the files are called" in found
    shutil.rmtree(root)
    root.mkdir()
    assert "paths are relative to data.path, or absolute" in refusal(
        find_labelled, str(root), str(tmp_path / "labels.csv")
    )


def test_pictures_beside_those_that_are_named_are_left_out_and_said(tmp_path, caplog):
    root, labels = labelled(tmp_path, GOOD)
    put(tmp_path / "zoo", "elsewhere/0.png", "ant/.hidden.png", "ant/deeper/0.png")
    with caplog.at_level("INFO"):
        assert len(find_labelled(root, labels)) == 2
    assert f"{labels} doesn't name 4 pictures beside those it names; they are left out, such as " in caplog.text
    assert f"'{root}/ant/1.png'" in caplog.text


def test_splits_that_only_the_folders_tell_are_said(tmp_path):
    root = put(tmp_path / "zoo", *(f"{split}/{i}.png" for split in ("train", "test") for i in range(2)))
    labels = tmp_path / "labels.csv"
    rows = [f"{split}/{i}.png,{label}" for split in ("train", "test") for i, label in enumerate("xy")]
    labels.write_text("\n".join(["path,label", *rows]))
    with pytest.warns(
        UserWarning, match=r"no column 'split', so that splits are drawn although .* 'test', 'train'; add"
    ):
        find_labelled(str(root), str(labels))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        labels.write_text("\n".join(["path,label,split", *(f"{row},{row.partition('/')[0]}" for row in rows)]))
        find_labelled(str(root), str(labels))
        labels.write_text("\n".join(["path,label", *rows[:2]]))
        find_labelled(str(root), str(labels))


def test_errors_of_labels_name_the_csv_file(tmp_path):
    root = painted(tmp_path / "zoo", {"ant": 4, "bee": 4})
    labels = tmp_path / "labels.csv"
    for text, message in {
        "path,label\nant/00.png,x\nbee/00.png,y\n": "the classes 'x', 'y' have fewer than 3 pictures",
        "path,label\nant/00.png,x\nant/01.png,x\nant/02.png,x\n": "has one class, 'x'",
        "path,label,split\nant/00.png,x,test\nant/01.png,y,val\n": "has no training pictures, only others; give some",
        "path,label,split\nant/00.png,x,train\nant/01.png,y,val\nbee/00.png,y,test\n": "pictures of the classes 'y'",
    }.items():
        labels.write_text(text)
        found = refusal(ready, root, labels=str(labels))
        assert found.startswith(f"data.labels: {labels}")
        assert message in found


# ---------------------------------------------------------------------- the same picture twice


def warned_of_twins(path, **options):
    with warnings.catch_warnings(record=True) as raised:
        warnings.simplefilter("always")
        ready(path, **options)
    return [str(warning.message) for warning in raised if "are the same file" in str(warning.message)]


@pytest.mark.parametrize("how", [shutil.copy, os.symlink, os.link])
def test_a_picture_in_two_splits_is_said(tmp_path, how):
    root = painted(tmp_path / "zoo", {"train/ant": 4, "train/bee": 4, "test/ant": 3, "test/bee": 3})
    assert warned_of_twins(root) == []
    how(root / "train" / "ant" / "00.png", root / "test" / "ant" / "again.png")
    how(root / "train" / "ant" / "01.png", root / "test" / "ant" / "more.png")
    (found,) = warned_of_twins(root)
    assert found.startswith("data.path: zoo has 2 pictures more than once with different splits, so that figures are")
    assert "'test/ant/again.png' and 'train/ant/00.png' are the same file" in found


def test_a_split_that_is_a_link_to_another_is_said(tmp_path):
    root = painted(tmp_path / "zoo", {"train/ant": 3, "train/bee": 3, "test/ant": 3, "test/bee": 3})
    (root / "val").symlink_to("test")
    assert len(warned_of_twins(root)) == 1


def test_splits_of_a_folder_that_a_checkpoint_was_not_trained_on_flatter_nothing(tmp_path):
    root = painted(tmp_path / "zoo", {"ant": 4, "bee": 4})
    checkpoint = save_checkpoint(tmp_path / "model.ckpt", ready(root))
    other = painted(tmp_path / "other", {"train/ant": 2, "train/bee": 2, "test/ant": 2, "test/bee": 2}, seed=1)
    shutil.copy(other / "train" / "ant" / "00.png", other / "test" / "ant" / "again.png")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        ready(other, "test", from_checkpoint=checkpoint)


def test_a_picture_with_two_labels_is_said(tmp_path):
    splits = ("train", "val", "test")
    root = painted(tmp_path / "zoo", {f"{split}/{name}": 3 for split in splits for name in ("ant", "bee")})
    shutil.copy(root / "train" / "ant" / "00.png", root / "train" / "ant" / "again.png")
    shutil.copy(root / "train" / "ant" / "00.png", root / "train" / "bee" / "again.png")
    (found,) = warned_of_twins(root)
    assert "1 pictures more than once with different labels, so that one of them is wrong: " in found
    assert "'train/ant/00.png' and 'train/bee/again.png'" in found


def test_copies_that_a_drawn_split_takes_apart_are_said(tmp_path):
    root = painted(tmp_path / "zoo", {"ant": 8, "bee": 8})
    for i in range(8):
        shutil.copy(root / "ant" / f"{i:02}.png", root / "ant" / f"copy{i}.png")
    before = ready(root).identity()
    (found,) = warned_of_twins(root)
    assert "with different splits" in found
    assert ready(root).identity() == before, "it is said, and changes nothing"


def test_copies_of_a_picture_that_is_skipped_are_none(tmp_path):
    root = painted(tmp_path / "zoo", {"train/ant": 4, "train/bee": 4, "test/ant": 3, "test/bee": 3})
    for place in ("train", "test"):
        (root / place / "ant" / "bad.png").write_bytes(b"the same")
        (root / place / "bee" / "empty.png").touch()
    assert warned_of_twins(root, on_bad_image="skip") == []


def test_twins_are_told_by_all_their_bytes(tmp_path):
    end = b"z" * 5000
    contents = {"a": b"1" + end, "b": b"2" + end, "c": b"1" + end, "d": b"1", "e": b"1", "f": b"", "g": b"", "h": b"2"}
    for name, content in contents.items():
        (tmp_path / name).write_bytes(content)
    os.mkfifo(tmp_path / "pipe")
    files = [str(tmp_path / name) for name in (*contents, "missing", "pipe")]
    assert find_twins(files) == [[0, 2], [3, 4]]


def test_twins_are_looked_for_once_while_files_stay_as_they_are(tmp_path, monkeypatch):
    opened = []
    original = datamodules.image_files._end_of
    monkeypatch.setattr(datamodules.image_files, "_end_of", lambda file: opened.append(file) or original(file))
    root = put(tmp_path / "zoo", *(f"{i}.png" for i in range(9)))
    files = [str(root / f"{i}.png") for i in range(9)]
    assert find_twins(files) == []
    assert opened == [], "of files of different sizes none is opened"
    shutil.copy(files[8], files[0])
    for _ in range(2):
        assert find_twins(files) == [[0, 8]]
    assert sorted(opened) == [files[0], files[8]]
    for damaged in ("[[0, 99]]", "[7", "7"):
        cache = tmp_path / "cache"
        monkeypatch.setenv("ZOO_CACHE", str(cache))
        find_twins(files)
        (kept,) = (cache / "images" / "twins").iterdir()
        kept.write_text(damaged)
        assert find_twins(files) == [[0, 8]], "a damaged cache is no cache"


# ---------------------------------------------------------------------- classes and sizes that are odd


def test_classes_that_a_held_out_split_lacks_are_named(tmp_path, caplog):
    counts = {"train/ant": 4, "train/bee": 4, "train/cow": 4, "val/ant": 1, "val/bee": 1, "val/cow": 1, "test/bee": 2}
    root = painted(tmp_path / "zoo", counts)
    with caplog.at_level("INFO"):
        data = ready(root)
    assert "data.path: zoo has no test pictures of 'ant', 'cow', so that figures tell nothing of these" in caplog.text
    assert "no val pictures" not in caplog.text
    checkpoint = save_checkpoint(tmp_path / "model.ckpt", data)
    with caplog.at_level("INFO"):
        ready(painted(tmp_path / "other", {"ant": 1}), "test", from_checkpoint=checkpoint)
    assert "data.path: other has no pictures of 'bee', 'cow', so that figures tell nothing of these" in caplog.text


def test_one_picture_of_a_class_in_each_split_is_enough(tmp_path):
    data = ready(
        painted(tmp_path / "zoo", {f"{split}/{name}": 1 for split in ("train", "val", "test") for name in "ab"})
    )
    assert data.identity()["source"]["class_counts"] == {"a": 1, "b": 1}
    assert [len(batch["id"]) for batch in data.test_dataloader()] == [2]


@pytest.mark.parametrize("size", [(1, 1), (1, 7), (7, 1), (3, 300), (301, 17)])
def test_pictures_of_odd_sizes_become_what_the_model_wants(tmp_path, size):
    data = ready(painted(tmp_path / "zoo", {"ant": 4, "bee": 4}, size=size), batch_size=2)
    for loader in (data.train_dataloader(), data.test_dataloader()):
        for batch in loader:
            assert batch["image"].shape == (2, 3, 8, 8)
            assert torch.isfinite(batch["image"]).all()


# ---------------------------------------------------------------------- what a checkpoint was trained on


def warned(match, path, stage, **options):
    with pytest.warns(UserWarning, match=match):
        return ready(path, stage, **options)


def test_going_on_with_other_pictures_is_said(tmp_path):
    root = painted(tmp_path / "zoo", {"ant": 8, "bee": 8})
    checkpoint = save_checkpoint(tmp_path / "model.ckpt", ready(root))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        ready(root, "fit", from_checkpoint=checkpoint)
    other = painted(tmp_path / "other", {"ant": 5, "bee": 5}, seed=1)
    warned(
        r"data\.path: other: training goes on with other pictures than .*, which were zoo \(16 then, 10 now\)",
        other, "fit", from_checkpoint=checkpoint,
    )  # fmt: skip
    paint(root, ["ant/new.png"], seed=2)
    warned(
        r"zoo have changed since .* \(16 then, 17 now\): they are split anew", root, "fit", from_checkpoint=checkpoint
    )
    warned(r"zoo have changed since .*: all are used, also those", root, "test", from_checkpoint=checkpoint)


def test_labels_and_splits_that_changed_are_said(tmp_path):
    root = painted(tmp_path / "zoo", {"all": 9})
    rows = [f"all/{i:02}.png,{'xy'[i % 2]},{('train', 'val', 'test')[i // 4]}" for i in range(9)]
    labels = tmp_path / "labels.csv"
    labels.write_text("\n".join(["path,label,split", *rows]))
    checkpoint = save_checkpoint(tmp_path / "model.ckpt", ready(root, labels=str(labels)))
    labels.write_text("\n".join(["path,label,split", rows[0].replace("train", "test"), *rows[1:]]))
    for stage in ("test", "fit"):
        warned(
            r"or their labels have \(9 then, 9 now\): those that were moved to another split since may be among",
            root, stage, labels=str(labels), from_checkpoint=checkpoint,
        )  # fmt: skip


def test_a_seed_that_splits_nothing_is_no_other_split(tmp_path):
    root = painted(tmp_path / "zoo", {f"{split}/{name}": 2 for split in ("train", "val", "test") for name in "ab"})
    checkpoint = save_checkpoint(tmp_path / "model.ckpt", ready(root))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        ready(root, "test", from_checkpoint=checkpoint, split_seed=3, val_fraction=0.3)
    shutil.rmtree(root / "val")
    checkpoint = save_checkpoint(tmp_path / "model.ckpt", ready(root, test_fraction=0.3))
    warned(r"\(data\.split_seed was 0\)", root, "test", from_checkpoint=checkpoint, split_seed=3, test_fraction=0.2)


# ---------------------------------------------------------------------- what folders were known by, they stay known by


def test_fingerprints_are_what_they_were(tmp_path):
    def written(place, names):
        for i, name in enumerate(names):
            file = tmp_path / place / "zoo" / name
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_bytes(b"x" * (i + 1))
        return str(tmp_path / place / "zoo")

    a = ["ant/0.png", "ant/1.jpg", "bee/0.png", "Bee/0.png", "bee/deep/2.png", "ant/.h.png", "stray.png", "ant/x.txt"]
    b = ["train/ant/0.png", "Validation/ant/0.png", "test/ant/1.png"]
    b += ["train/bee/0.png", "Validation/bee/1.png", "test/bee/3.png"]
    for place, names, expected in (
        ("a", a, "a74efe586c2ecc6405ec5e2849585d532f0d6406e2482e0d057cd37fd321df13"),
        ("b", b, "89600e5caed7a9151bfb9e8ccbb09f03ee77b2fc28a6bac5e26b31250314242a"),
        (
            "c",
            ["train/a.png", "test/b.png", "boat/c.png"],
            "d6e1a724f3cbf9f1469ca09d39dc4907e8cdb0bc0145c4dedf3e6340757a00a7",
        ),
    ):
        assert find_classes(written(place, names)).fingerprint == expected
    folder = written("d", ["a.png", "b/c.png", "e.png"])
    for text, expected in (
        (
            "path,label,split\na.png,x ,train\nb/c.png, NA,val\n./e.png,001,test\n",
            "28b3e3912a9be411b85db9845585be52b1b602bb38a5c3f23fcec1481f41b9ba",
        ),
        (
            "label,path\n1.0,e.png\nNone,a.png\n1.0,e.png\n",
            "b32470f69c20389e6f77ee060cf90cb62cdce0ef5f7af8273f038520e8d41c76",
        ),
    ):
        (tmp_path / "labels.csv").write_text(text)
        assert find_labelled(folder, str(tmp_path / "labels.csv")).fingerprint == expected
