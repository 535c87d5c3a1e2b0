"""summary: what is sketched, with what, what stays exact and why, and the bytes of a row."""

import pytest
import torch
from torch import nn

from rmm_linear import RMMConfig, RMMLinear, convert_linears, summary


def model():
    layers = nn.ModuleDict(
        {
            "wide": nn.Linear(64, 32),
            "narrow": nn.Linear(16, 16).to(torch.bfloat16),
            "frozen": nn.Linear(64, 64).requires_grad_(False),
            "left": nn.Linear(8, 8),
            "attention": nn.MultiheadAttention(8, 2),
            "classifier": nn.Linear(64, 2),
        }
    )
    config = RMMConfig(ratio=0.25, center=False)
    targets = ["wide", "narrow", "frozen"]
    return convert_linears(layers, config=config, target_modules=targets, overrides={"narrow": RMMConfig(ratio=1.0)})


def rows():
    return {row.name: row for row in summary(model()).rows}


def test_a_row_tells_how_a_layer_is_sketched_and_what_a_row_keeps():
    assert list(rows()) == ["wide", "narrow", "frozen", "left", "attention.out_proj", "classifier"]
    wide, narrow, frozen = (rows()[name] for name in ("wide", "narrow", "frozen"))
    assert wide.config == RMMConfig(ratio=0.25, center=False)
    assert (wide.in_features, wide.out_features, wide.dtype, wide.note) == (64, 32, "float32", "")
    # in the dtype of the weight
    assert wide.exact_bytes_per_row == 64 * 4
    assert wide.kept_bytes_per_row == RMMConfig(ratio=0.25, center=False).saved_bytes(4096, 64, torch.float32) / 4096
    assert wide.kept_bytes_per_row == pytest.approx(64 * 4 * 0.25, rel=0.01)
    assert narrow.exact_bytes_per_row == narrow.kept_bytes_per_row == 16 * 2
    assert (frozen.exact_bytes_per_row, frozen.kept_bytes_per_row) == (0, 0)
    whole = summary(model())
    assert whole.exact_bytes_per_row == sum(row.exact_bytes_per_row for row in whole.rows) > whole.kept_bytes_per_row
    assert whole.sketched == 1


def test_a_row_tells_why_a_layer_is_exact():
    by_itself = "nn.MultiheadAttention reads its weight without calling it (and its in_proj_weight is no layer)"
    assert {name: row.note for name, row in rows().items()} == {
        "wide": "",
        "narrow": "exact: ratio 1",
        "frozen": "frozen weight: keeps no input",
        "left": "exact: not targeted, or excluded",
        "attention.out_proj": f"exact: {by_itself}",
        "classifier": "exact: output head",
    }


def test_the_table_is_printed_once_and_aligned(capsys):
    print(summary(model()))
    lines = capsys.readouterr().out.splitlines()
    # a prompt shows the same
    assert lines == repr(summary(model())).splitlines()
    assert len(lines) == 2 + 6 + 2
    starts = {line.index(part) for line, part in zip(lines[2:4], ["hadamard", "hadamard"], strict=True)}
    assert starts == {lines[0].index("sketch")}
    assert "64 -> 32" in lines[2]
    assert lines[-2].startswith("1 of 6 linear layers are sketched")
    assert lines[-1].startswith("at most: ")


@pytest.mark.parametrize(
    ("changes", "how", "knob"),
    [
        ({"storage": "int4"}, "hadamard 0.4 centered in int4, from 128 rows", "storage='int4'"),
        ({"storage": "int4", "ratio": 1.0, "center": False}, "input in int4, from 128 rows", "storage='int4'"),
        ({"skip_padding": True}, "hadamard 0.4 centered, without padding, from 128 rows", "skip_padding=True"),
        ({"keep_tokens": (0,)}, "beside tokens 0", "keep_tokens=(0,)"),
    ],
    ids=str,
)
def test_a_row_and_a_layer_tell_each_knob_that_differs(changes, how, knob):
    layer = RMMLinear(64, 64, config=RMMConfig(ratio=0.4).replace(**changes))
    assert how in str(summary(layer))
    assert knob in repr(layer)
    assert knob.partition("=")[0] not in repr(RMMLinear(4, 4))


def test_odd_models_have_a_summary_and_others_are_refused():
    assert "(the model)" in str(summary(convert_linears(nn.Linear(8, 8))))
    assert "LazyLinear" in summary(nn.Sequential(nn.LazyLinear(4))).rows[0].note
    assert str(summary(nn.ReLU())) == "no linear layers"
    with pytest.raises(ValueError, match="model is a list"):
        summary([nn.Linear(2, 2)])
