"""What a checkpoint says of itself, and what is refused before it is believed."""

import pickle

import pytest
import torch

from zoo.checkpoint.identity import canonical_json, check_identity, differences, digest, read_checkpoint, read_claim
from zoo.errors import CheckpointMismatchError, ZooError


def test_digest_is_sha256_of_canonical_json():
    # computed with: printf '{"a":"\303\274","b":[1,2]}' | sha256sum
    import hashlib

    assert canonical_json({"b": [1, 2], "a": "ü"}) == '{"a":"ü","b":[1,2]}'
    assert digest({"b": [1, 2], "a": "ü"}) == hashlib.sha256(b'{"a":"\xc3\xbc","b":[1,2]}').hexdigest()


def test_order_of_keys_does_not_matter_and_order_of_names_does():
    assert digest({"a": 1, "b": ["x", "y"]}) == digest({"b": ["x", "y"], "a": 1})
    assert digest({"b": ["x", "y"]}) != digest({"b": ["y", "x"]})


def test_differences_name_the_first_differing_token_and_what_is_missing_and_extra():
    found = " | ".join(differences({"tokens": ["a", "b", "c"]}, {"tokens": ["a", "x", "c", "d"]}))
    assert "first difference at 1: 'b' in the checkpoint, 'x' here" in found
    assert "only in the checkpoint: 'b'" in found
    assert "only here: 'x', 'd'" in found
    assert "3 in the checkpoint, 4 here" in found


def test_swapped_names_are_a_difference_though_none_is_missing():
    assert differences({"tokens": ["a", "b"]}, {"tokens": ["b", "a"]}) == [
        "tokens: first difference at 0: 'a' in the checkpoint, 'b' here"
    ]


def test_provenance_is_no_difference_but_part_of_the_digest():
    old, new = {"tokens": ["a"], "source": {"python": "3.11"}}, {"tokens": ["a"], "source": {"python": "3.12"}}
    assert differences(old, new) == []
    assert digest(old) != digest(new)


def test_mismatch_ends_in_the_advice():
    with pytest.raises(CheckpointMismatchError, match=r"kind: 'text' in the checkpoint, 'image' here.* Do this\.$"):
        check_identity({"kind": "text"}, {"kind": "image"}, "Do this.")


def test_missing_file_and_folder_are_named(tmp_path):
    with pytest.raises(ZooError, match=r"there is no file .*nowhere\.ckpt"):
        read_checkpoint(tmp_path / "nowhere.ckpt")
    with pytest.raises(ZooError, match="is a folder"):
        read_checkpoint(tmp_path)


@pytest.mark.parametrize("share", [0.0, 0.01, 0.5, 0.999])
def test_truncated_file_is_refused_in_one_line(trained, tmp_path, share):
    whole = trained.read_bytes()
    cut = tmp_path / "cut.ckpt"
    cut.write_bytes(whole[: int(len(whole) * share)])
    with pytest.raises(ZooError, match="no complete checkpoint") as raised:
        read_checkpoint(cut)
    assert "\n" not in str(raised.value)


def test_flipped_byte_in_a_tensor_is_refused(trained, tmp_path):
    whole = bytearray(trained.read_bytes())
    weight = torch.load(trained, weights_only=True)["state_dict"]["network.decoder.shared_mlp.out.weight"]
    place = whole.find(weight.numpy().tobytes())
    assert place > 0
    whole[place + 5] ^= 0x10
    (tmp_path / "flipped.ckpt").write_bytes(whole)
    with pytest.raises(ZooError, match="no complete checkpoint"):
        read_checkpoint(tmp_path / "flipped.ckpt")


class _Runs:
    def __init__(self, marker):
        self.marker = marker

    def __reduce__(self):
        return (open, (self.marker, "w"))


def test_code_in_a_checkpoint_is_refused_and_never_run(tmp_path):
    marker = tmp_path / "ran"
    torch.save({"zoo": _Runs(str(marker))}, tmp_path / "evil.ckpt")
    with pytest.raises(ZooError, match="Python objects that loading would have to run"):
        read_checkpoint(tmp_path / "evil.ckpt")
    (tmp_path / "evil.pkl").write_bytes(pickle.dumps(_Runs(str(marker))))
    with pytest.raises(ZooError):
        read_checkpoint(tmp_path / "evil.pkl")
    assert not marker.exists()


def test_foreign_and_altered_checkpoints_are_refused(trained, tmp_path):
    with pytest.raises(ZooError, match="carries no data identity"):
        read_claim({"state_dict": {}}, "x.ckpt")
    checkpoint = read_checkpoint(trained)
    checkpoint["zoo"]["identity"]["tokens"][300 - 1] = "something"
    with pytest.raises(ZooError, match="was altered"):
        read_claim(checkpoint, "x.ckpt")


def test_a_list_is_no_checkpoint(tmp_path):
    torch.save([1, 2], tmp_path / "list.ckpt")
    with pytest.raises(ZooError, match="holds a list"):
        read_checkpoint(tmp_path / "list.ckpt")
