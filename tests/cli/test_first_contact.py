"""What a new user meets: mistakes are told at once and in a line, screens hold nothing but the answer."""

import json
import sys
import time
import warnings

import pytest
import torch
import torch.nn.functional as F

from rmm_linear.cli import main
from rmm_linear.cli.fused_attention import fused_attention
from rmm_linear.memory import SavedTensors

transformers = pytest.importorskip("transformers")


@pytest.fixture
def folder(gpt2_folder, monkeypatch):
    monkeypatch.chdir(gpt2_folder.parent)
    return gpt2_folder.parent


NOWHERE = ("./gpt2-smal", "~/nowhere-at-all", "models/of/mine", "mine.json")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        *((f"profile {name}", f"there is no file or folder '{name}'") for name in NOWHERE),
        ("profile gpt2 --ratio x", "is no list of numbers"),
        ("profile gpt2 --ratio 1.5", "ratio=1.5 is not in (0, 1]"),
        ("profile gpt2 --layers 0", "--layers 0 is below 1"),
        ("plan ./none", "there is no file or folder"),
        ("plan gpt2 --budget much", "budget='much' is no budget"),
        ("plan gpt2 --strategy magic", "strategy='magic' is unknown"),
        ("plan gpt2 --batch 0", "--batch 0 is below 1"),
        ("plan gpt2 --batch 100000000000000000000", "is above 2**31"),
        ("fit ./none --budget 1GiB", "there is no file or folder"),
        ("fit gpt2 --budget much", "budget='much' is no budget"),
        ("fit gpt2 --budget 1GiB --noise -1", "noise=-1.0 is no share"),
        ("fit gpt2 --budget 1GiB --batch 0", "--batch 0 is below 1"),
        ("fit gpt2 --budget 60% --batch max", "pass a budget in bytes, such as 8GiB"),
        ("fit gpt2 --budget 1GiB --figure fit.what", "choose a name that ends in one of"),
        ("plan gpt2 --figure nowhere/plan.png", "there is no folder"),
        ("doctor --device gpu", "no such device; use cpu, cuda"),
        ("doctor --device meta", "plain torch is checked on cpu or cuda"),
        ("doctor --device cuda:99", "CUDA dev"),
    ],
)
def test_a_mistake_is_one_line_before_transformers_is_loaded(arguments, message, monkeypatch, refused):
    monkeypatch.setitem(sys.modules, "rmm_linear.integrations.hf_models", None)
    error = refused(*arguments.split())
    assert message in error
    assert "transformers" not in error


@pytest.mark.parametrize(
    "change",
    [{"num_attention_heads": 0}, {"vocab_size": "x"}, {"architectures": ["BertTokenizer"]}, {"hidden_act": "x"}],
    ids=str,
)
def test_a_configuration_that_makes_no_model_is_one_line(change, tmp_path, refused):
    path = tmp_path / "model.json"
    path.write_text(json.dumps({"model_type": "bert", "hidden_size": 32, "num_hidden_layers": 1, **change}))
    assert f"transformers makes no model of {str(path)!r} (" in refused("plan", str(path))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("profile gpt2-small --batch 2000000000", "no memory for 2000000000 x"),
        ("plan gpt2-small --seq 8 --budget 100% --figure gpt2-small/x.png", "Is a directory"),
        ("profile gpt2-small --seq 5000", "length=5000 is more than the model's 4096 positions"),
    ],
)
def test_memory_files_and_positions_that_are_not_there_are_one_line(arguments, message, folder, monkeypatch, refused):
    randint = torch.randint

    def limited(low, high, size, **options):
        if size[0] > 10**6:
            raise RuntimeError("not enough memory")
        return randint(low, high, size, **options)

    monkeypatch.setattr(torch, "randint", limited)
    (folder / "gpt2-small" / "x.png").mkdir()
    assert message in refused(*arguments.split())


def test_a_model_of_images_may_name_no_size_of_them(tmp_path, answer, refused):
    path = tmp_path / "model.json"
    sizes = {"embedding_size": 8, "hidden_sizes": [8, 8], "depths": [1, 1]}
    kind = {"model_type": "resnet", "architectures": ["ResNetForImageClassification"], "layer_type": "basic"}
    path.write_text(json.dumps(kind | sizes))
    assert "pixel_values (1, 3, 224, 224)" in answer("profile", str(path), "--batch", "1")
    error = refused("profile", str(path), "--batch", "2000000000")
    assert "no memory for 2000000000 x 3 x 224 x 224 random numbers" in error


def test_a_hub_that_cannot_be_reached_is_told_soon(folder, monkeypatch, refused):
    asked = []

    class Unreachable:
        def head(self, url, *, timeout):
            asked.append(timeout)
            raise OSError("no route to host")

    monkeypatch.setattr("rmm_linear.integrations.hf_models.get_session", Unreachable)
    begin = time.monotonic()
    error = refused("profile", "some-org/some-model")
    assert time.monotonic() - begin < 5
    assert "the hub can't be reached (no route to host), and 'some-org/some-model' is not in its cache" in error
    assert asked == [5]


@pytest.mark.parametrize(
    ("command", "parts"),
    [
        ("profile --batch 2 --seq 32", ()),
        (
            "plan --strategy chen2016_sqrt --budget 70% --batch 4 --seq 48 --figure plan.png",
            ("transformer.h.0", "extra compute"),
        ),
        ("fit --budget 100% --batch 2 --seq 32", ()),
    ],
)
def test_a_screen_holds_nothing_but_the_answer(command, parts, folder, capfd, monkeypatch):
    from rmm_linear.integrations import hf_models

    build = hf_models.build_model

    def noisy(*args, **options):
        warnings.warn("is deprecated", FutureWarning, stacklevel=1)
        transformers.utils.logging.get_logger("transformers.modeling").warning("a notice")
        return build(*args, **options)

    monkeypatch.setattr(hf_models, "build_model", noisy)
    verbosity = transformers.utils.logging.get_verbosity()
    name, *options = command.split()
    assert main([name, str(folder / "gpt2-small"), *options]) == 0
    captured = capfd.readouterr()
    assert captured.err == ""
    assert captured.out.startswith(str(folder / "gpt2-small"))
    assert all(part in captured.out for part in parts)
    assert "--figure" not in options or (folder / "plan.png").stat().st_size > 10_000
    assert transformers.utils.logging.get_verbosity() == verbosity


def test_shapes_alone_estimate_fused_attention(folder, answer):
    command = ["profile", "gpt2-small", "--meta", "--batch", "2", "--seq", "2048", "--ratio", "0.5"]
    text = answer(*command)
    assert "softmax  " not in text.replace("log_softmax", "")
    assert "attention is estimated as a GPU's fused kernel" in text
    kept = {}
    for more in ([], ["--attention", "eager"]):
        kept[bool(more)] = json.loads(answer(*command, *more, "--json"))["columns"][0]["bytes"]
    # scores of 2 sequences and 2 heads, once at least
    assert kept[True] - kept[False] > 2 * 2 * 2048**2 * 4


@pytest.mark.parametrize("mask", [None, "bool", "float"])
def test_what_fused_attention_keeps(mask):
    heads = [torch.empty(2, 4, 256, 16, device="meta", requires_grad=True) for _ in range(3)]
    given = {None: None, "bool": torch.ones(256, 256, dtype=torch.bool), "float": torch.zeros(256, 256)}[mask]
    given = None if given is None else given.to("meta")
    with SavedTensors() as saved, fused_attention():
        result = F.scaled_dot_product_attention(*heads, attn_mask=given, is_causal=mask is None, dropout_p=0.1)
    assert result.shape == heads[0].shape
    # query, key, value and result; a float a row; the mask as floats; a seed and an offset
    own = 4 * heads[0].nbytes + 2 * 4 * 256 * 4 + (0 if mask is None else 256 * 256 * 4)
    assert own <= saved.bytes <= own + 64
    result.sum().backward()
    assert heads[2].grad.shape == heads[2].shape


def test_fused_attention_with_fewer_keys_than_queries_keeps_no_copies_of_them():
    query, key = (torch.empty(2, heads, 64, 16, device="meta", requires_grad=True) for heads in (8, 2))
    with SavedTensors() as saved, fused_attention():
        F.scaled_dot_product_attention(query, key, key * 1, is_causal=True, enable_gqa=True)
    assert saved.bytes < 2.8 * query.nbytes


def test_terabytes_are_no_mebibytes(folder, answer):
    config = transformers.GPT2Config(
        vocab_size=50, n_embd=8192, n_layer=16, n_head=64, n_positions=4096, architectures=["GPT2LMHeadModel"]
    )
    config.save_pretrained(folder / "large")
    text = answer("profile", "large", "--meta", "--batch", "256", "--seq", "4096", "--ratio", "0.5")
    assert "TiB" in text
    assert "MiB" not in text
