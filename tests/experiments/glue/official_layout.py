"""Tiny folders in the official GLUE layout: no test needs the real data."""

from experiments.glue.tasks import TASKS

# header and rows of the official files; "{label}" and "{n}" are filled in
_MNLI = "index\tpromptID\tpairID\tgenre\tsentence1_binary_parse\tsentence2_binary_parse\tsentence1_parse"
_MNLI_ROW = "{n}\t1\t1e\tfiction\t( a )\t( b )\t(ROOT a)\t(ROOT b)\tpremise {n}\thypothesis {n}\t{label}\t{label}"
_MRPC_ROW = '{label}\t70\t71\tHe said "{n}\tsentence {n} was "odd".'
_STSB = "index\tgenre\tfilename\tyear\told_index\tsource1\tsource2\tsentence1\tsentence2\tscore"
_STSB_ROW = "{n}\tnews\tMSRvid\t2012test\t1\tnone\tnone\tone {n}\ttwo {n}\t{label}"
_PAIR, _PAIR_ROW = "index\tsentence1\tsentence2\tlabel", "{n}\tfirst {n}\tsecond {n}\t{label}"
_TWO, _NAMES = ("0", "1"), ("entailment", "not_entailment")
OFFICIAL_FILES = {
    "cola": ("", "gj04\t{label}\t*\tsentence {n}", _TWO),
    "sst2": ("sentence\tlabel", "sentence {n} \t{label}", _TWO),
    "mrpc": ("Quality\t#1 ID\t#2 ID\t#1 String\t#2 String", _MRPC_ROW, _TWO),
    "qqp": ("id\tqid1\tqid2\tquestion1\tquestion2\tis_duplicate", "{n}\t1\t2\tWhy {n}?\tHow {n}?\t{label}", _TWO),
    "stsb": (_STSB, _STSB_ROW, ("0.000", "2.600", "5.000")),
    "mnli": (
        _MNLI + "\tsentence2_parse\tsentence1\tsentence2\tlabel1\tgold_label",
        _MNLI_ROW,
        ("entailment", "neutral", "contradiction"),
    ),
    "qnli": ("index\tquestion\tsentence\tlabel", "{n}\tWhat is {n}?\tA number {n}.\t{label}", _NAMES),
    "rte": (_PAIR, _PAIR_ROW, _NAMES),
    "wnli": (_PAIR, _PAIR_ROW, _TWO),
}


def write_official_folder(root, task_name, *, train_rows=12, dev_rows=6):
    """Make the folder of one task and return it."""
    task = TASKS[task_name]
    header, row, labels = OFFICIAL_FILES[task_name]
    folder = root / task.folder
    folder.mkdir(parents=True)
    for name, rows in (("train.tsv", train_rows), (task.dev_file, dev_rows)):
        lines = [header] if header else []
        lines += [row.format(n=n, label=labels[n % len(labels)]) for n in range(rows)]
        (folder / name).write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    return folder
