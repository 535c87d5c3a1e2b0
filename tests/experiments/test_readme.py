"""README.md and docs/: their code runs, their links lead somewhere, their tables are what the committed results say."""

import re

import pytest
import torch
from tiny_transformers import tiny

from experiments import readme
from rmm_linear import RMMLinear

transformers = pytest.importorskip("transformers")

PAGES = [readme.README, *sorted((readme.ROOT / "docs").glob("*.md"))]
BLOCKS = [block for page in PAGES for block in re.findall(r"```python\n(.*?)```", page.read_text(), re.DOTALL)]


def _examples():
    return [
        {"input_ids": torch.randint(3, 50, (20,)), "attention_mask": torch.ones(20, dtype=torch.int64), "labels": label}
        for label in [torch.tensor(index % 2) for index in range(16)]
    ]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:the sketched layers promise")
def test_every_block_of_code_runs(tmp_path, monkeypatch):
    # a fence that is written otherwise would leave its block out
    assert len(BLOCKS) == sum(page.read_text().count("```python") for page in PAGES) > 0
    # one draws a figure
    monkeypatch.chdir(tmp_path)
    for block in BLOCKS:
        sizes = {"hidden_size": 16, "num_hidden_layers": 1, "intermediate_size": 32, "max_position_embeddings": 514}
        model = tiny("RobertaForSequenceClassification", dropout=0.1, **sizes)
        # a block that takes sample numbers out of its batches has them there
        numbers = [{"idx": torch.tensor(index)} if '"idx"' in block else {} for index in range(16)]
        examples = [{**example, **number} for example, number in zip(_examples(), numbers, strict=True)]
        names = {
            "model": model,
            "args": transformers.TrainingArguments(
                output_dir=str(tmp_path), max_steps=2, per_device_train_batch_size=8, report_to="none", use_cpu=True
            ),
            "train_dataset": _examples(),
            "dataset": examples,
            "train_dataloader": torch.utils.data.DataLoader(examples, batch_size=8),
            "batch": next(iter(torch.utils.data.DataLoader(_examples(), batch_size=8))),
            "batches": list(torch.utils.data.DataLoader(_examples(), batch_size=4)),
            "optimizer": torch.optim.AdamW(model.parameters()),
        }
        exec(compile(block, "README.md", "exec"), names)
        if "(model" in block:
            sketched = any(isinstance(module, RMMLinear) for module in model.modules())
            converts = "convert_linears(model" in block or "RMMCallback(ratio" in block
            assert sketched == (converts and "revert_linears(model)" not in block)


def test_links_lead_to_files():
    for page in PAGES:
        for link in re.findall(r"\]\((?!http)([^)#]+)", page.read_text()):
            assert (page.parent / link).exists(), f"{page.name}: {link}"


def test_the_tables_are_what_the_results_say():
    assert readme.main(["--check"]) == 0


def test_a_typed_number_is_found(tmp_path, monkeypatch):
    changed = tmp_path / "results.md"
    changed.write_text(readme.RESULTS.read_text().replace("<!-- end: layer -->", "| 0.1 |\n<!-- end: layer -->"))
    blocks = readme.pages()[readme.RESULTS]
    # the pages of the checkout are not written into
    monkeypatch.setattr(readme, "pages", lambda: {changed: blocks})
    assert readme.main(["--check"]) == 1
    assert readme.main([]) == 0
    assert readme.main(["--check"]) == 0


def test_the_readme_names_every_sketch_and_knob():
    from dataclasses import fields

    from rmm_linear import RMMConfig, available_sketches

    text = "".join(page.read_text() for page in PAGES)
    for name in (*available_sketches(), *(field.name for field in fields(RMMConfig) if field.init)):
        assert f"`{name}`" in text or f'"{name}"' in text, name
