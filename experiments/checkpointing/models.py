"""The models whose steps are planned and measured: published architectures in plain torch, and Transformers.

Image models are of torchvision's shapes; `width` scales their channels, so that on a small machine activations still
outweigh parameters. A batch is a dictionary of tensors, and a step returns its loss alone.
"""

from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

_CLASSES = 1000
Batch = dict[str, Tensor]


def _named(**parts: nn.Module) -> nn.Sequential:
    return nn.Sequential(OrderedDict(parts))


def _conv(inputs: int, outputs: int, kernel: int, **options: Any) -> nn.Sequential:
    """Convolution, batch norm, ReLU."""
    conv = nn.Conv2d(inputs, outputs, kernel, bias=False, **options)
    return nn.Sequential(conv, nn.BatchNorm2d(outputs), nn.ReLU(inplace=True))


class _Residual(nn.Module):
    def __init__(self, body: nn.Module, shortcut: nn.Module) -> None:
        super().__init__()
        self.body, self.shortcut = body, shortcut

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.body(x) + self.shortcut(x), inplace=True)


class _Mean(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.mean((2, 3))


def resnet(depths: Sequence[int], width: float = 1.0) -> nn.Module:
    """He et al. 2015, with bottlenecks whose stride is on the 3x3 convolution; `depths` are the stages' blocks."""
    channels = int(64 * width)
    stages, inputs = [], channels
    for stage, depth in enumerate(depths):
        blocks = []
        for place in range(depth):
            inner, stride = channels << stage, 2 if stage and not place else 1
            last = nn.Sequential(nn.Conv2d(inner, 4 * inner, 1, bias=False), nn.BatchNorm2d(4 * inner))
            body = nn.Sequential(_conv(inputs, inner, 1), _conv(inner, inner, 3, stride=stride, padding=1), last)
            shortcut = nn.Sequential()
            if stride > 1 or inputs != 4 * inner:
                projection = nn.Conv2d(inputs, 4 * inner, 1, stride=stride, bias=False)
                shortcut = nn.Sequential(projection, nn.BatchNorm2d(4 * inner))
            blocks.append(_Residual(body, shortcut))
            inputs = 4 * inner
        stages.append(nn.Sequential(*blocks))
    stem = nn.Sequential(_conv(3, channels, 7, stride=2, padding=3), nn.MaxPool2d(3, 2, 1))
    return _named(stem=stem, stages=nn.Sequential(*stages), mean=_Mean(), head=nn.Linear(inputs, _CLASSES))


def vgg19(width: float = 1.0) -> nn.Module:
    """Simonyan and Zisserman 2014, configuration E, without batch norm; `width` scales the classifier as well."""
    stages, inputs = [], 3
    for channels, depth in ((64, 2), (128, 2), (256, 4), (512, 4), (512, 4)):
        layers: list[nn.Module] = []
        for _ in range(depth):
            layers += [nn.Conv2d(inputs, int(channels * width), 3, padding=1), nn.ReLU(inplace=True)]
            inputs = int(channels * width)
        stages.append(nn.Sequential(*layers, nn.MaxPool2d(2)))
    hidden = int(4096 * width)
    head = nn.Sequential(
        *(nn.AdaptiveAvgPool2d(7), nn.Flatten()),
        *(nn.Linear(inputs * 49, hidden), nn.ReLU(inplace=True), nn.Dropout()),
        *(nn.Linear(hidden, hidden), nn.ReLU(inplace=True), nn.Dropout()),
        nn.Linear(hidden, _CLASSES),
    )
    return _named(stages=nn.Sequential(*stages), head=head)


class _DenseLayer(nn.Sequential):
    def forward(self, *features: Tensor) -> Tensor:
        return super().forward(torch.cat(features, 1))


class _DenseBlock(nn.Module):
    def __init__(self, inputs: int, growth: int, depth: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            _DenseLayer(
                *(nn.BatchNorm2d(each), nn.ReLU(inplace=True), nn.Conv2d(each, 4 * growth, 1, bias=False)),
                *(nn.BatchNorm2d(4 * growth), nn.ReLU(inplace=True)),
                nn.Conv2d(4 * growth, growth, 3, padding=1, bias=False),
            )
            for each in range(inputs, inputs + depth * growth, growth)
        )

    def forward(self, x: Tensor) -> Tensor:
        features = [x]
        for layer in self.layers:
            features.append(layer(*features))
        return torch.cat(features, 1)


def densenet161(width: float = 1.0) -> nn.Module:
    """Huang et al. 2016: growth 48, 96 channels first."""
    channels, growth, depths = int(96 * width), int(48 * width), (6, 12, 36, 24)
    stem = nn.Sequential(_conv(3, channels, 7, stride=2, padding=3), nn.MaxPool2d(3, 2, 1))
    stages: list[nn.Module] = []
    for place, depth in enumerate(depths):
        stages.append(_DenseBlock(channels, growth, depth))
        channels += depth * growth
        if place + 1 < len(depths):
            conv = nn.Conv2d(channels, channels // 2, 1, bias=False)
            stages.append(nn.Sequential(nn.BatchNorm2d(channels), nn.ReLU(inplace=True), conv, nn.AvgPool2d(2)))
            channels //= 2
    norm = nn.Sequential(nn.BatchNorm2d(channels), nn.ReLU(inplace=True), _Mean())
    return _named(stem=stem, stages=nn.Sequential(*stages), norm=norm, head=nn.Linear(channels, _CLASSES))


class _Inception(nn.ModuleList):
    def __init__(self, inputs: int, *channels: int) -> None:
        one, before_three, three, before_five, five, pooled = channels
        super().__init__(
            [
                _conv(inputs, one, 1),
                nn.Sequential(_conv(inputs, before_three, 1), _conv(before_three, three, 3, padding=1)),
                # 3x3 where the paper has 5x5, as in torchvision, which has the published number of parameters
                nn.Sequential(_conv(inputs, before_five, 1), _conv(before_five, five, 3, padding=1)),
                nn.Sequential(nn.MaxPool2d(3, 1, 1), _conv(inputs, pooled, 1)),
            ]
        )

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([branch(x) for branch in self], 1)


# channels of Szegedy et al. 2014, table 1; None is a pooling
_GOOGLENET: tuple[tuple[int, ...] | None, ...] = (
    (64, 96, 128, 16, 32, 32),
    (128, 128, 192, 32, 96, 64),
    None,
    (192, 96, 208, 16, 48, 64),
    (160, 112, 224, 24, 64, 64),
    (128, 128, 256, 24, 64, 64),
    (112, 144, 288, 32, 64, 64),
    (256, 160, 320, 32, 128, 128),
    None,
    (256, 160, 320, 32, 128, 128),
    (384, 192, 384, 48, 128, 128),
)
# blocks that a classifier comes after
_AUXILIARY = (3, 6)


class GoogLeNet(nn.Module):
    """Szegedy et al. 2014, with batch norm and the two classifiers in the middle."""

    def __init__(self, width: float = 1.0) -> None:
        super().__init__()
        channels, hidden = int(64 * width), int(128 * width)
        self.stem = nn.Sequential(
            *(_conv(3, channels, 7, stride=2, padding=3), nn.MaxPool2d(3, 2, ceil_mode=True)),
            *(_conv(channels, channels, 1), _conv(channels, 3 * channels, 3, padding=1)),
            nn.MaxPool2d(3, 2, ceil_mode=True),
        )
        inputs = 3 * channels
        self.stages, self.auxiliary = nn.ModuleList(), nn.ModuleDict()
        for place, shape in enumerate(_GOOGLENET):
            if shape is None:
                self.stages.append(nn.MaxPool2d(3 if place == 2 else 2, 2, ceil_mode=True))
                continue
            scaled = [int(each * width) for each in shape]
            self.stages.append(_Inception(inputs, *scaled))
            inputs = scaled[0] + scaled[2] + scaled[4] + scaled[5]
            if place in _AUXILIARY:
                self.auxiliary[str(place)] = nn.Sequential(
                    *(nn.AdaptiveAvgPool2d(4), _conv(inputs, hidden, 1), nn.Flatten()),
                    *(nn.Linear(16 * hidden, 8 * hidden), nn.ReLU(inplace=True), nn.Dropout(0.7)),
                    nn.Linear(8 * hidden, _CLASSES),
                )
        self.head = nn.Sequential(_Mean(), nn.Dropout(0.2), nn.Linear(inputs, _CLASSES))

    def forward(self, x: Tensor) -> list[Tensor]:
        """Return the outputs of the last classifier and of the classifiers in the middle."""
        x, outputs = self.stem(x), []
        for place, stage in enumerate(self.stages):
            x = stage(x)
            if str(place) in self.auxiliary:
                outputs.append(self.auxiliary[str(place)](x))
        return [self.head(x), *outputs]


class UNet(nn.Module):
    """Ronneberger et al. 2015: convolutions without padding, features of the way down cropped for the way up."""

    def __init__(self, width: float = 1.0) -> None:
        super().__init__()
        channels = [int(64 * width) << level for level in range(5)]
        self.down = nn.ModuleList(self._pair(inputs, c) for inputs, c in zip([1, *channels], channels, strict=False))
        self.up = nn.ModuleList(nn.ConvTranspose2d(2 * c, c, 2, stride=2) for c in reversed(channels[:-1]))
        self.merged = nn.ModuleList(self._pair(2 * c, c) for c in reversed(channels[:-1]))
        self.head = nn.Conv2d(channels[0], 2, 1)

    @staticmethod
    def _pair(inputs: int, outputs: int) -> nn.Sequential:
        first, second = nn.Conv2d(inputs, outputs, 3), nn.Conv2d(outputs, outputs, 3)
        return nn.Sequential(first, nn.ReLU(inplace=True), second, nn.ReLU(inplace=True))

    def forward(self, x: Tensor) -> Tensor:
        """Return the classes of the pixels that have all of their surroundings."""
        features = []
        for level, pair in enumerate(self.down):
            x = pair(F.max_pool2d(x, 2) if level else x)
            features.append(x)
        features.pop()
        for up, merged in zip(self.up, self.merged, strict=True):
            x = up(x)
            x = merged(torch.cat([_cropped(features.pop(), x), x], 1))
        return self.head(x)


def _cropped(x: Tensor, like: Tensor) -> Tensor:
    top, left = ((x.shape[axis] - like.shape[axis]) // 2 for axis in (-2, -1))
    return x[..., top : top + like.shape[-2], left : left + like.shape[-1]]


class LSTMLoop(nn.Module):
    """An LSTM cell in a loop over time, as Gruslys et al. 2016 train it."""

    def __init__(self, inputs: int, hidden: int) -> None:
        super().__init__()
        self.inputs = nn.Linear(inputs, 4 * hidden)
        self.state = nn.Linear(hidden, 4 * hidden, bias=False)
        self.head = nn.Linear(hidden, inputs)

    def forward(self, x: Tensor) -> Tensor:
        hidden = cell = x.new_zeros(x.shape[1], self.state.in_features)
        for step in x:
            entry, forget, new, exit_gate = (self.inputs(step) + self.state(hidden)).chunk(4, 1)
            cell = forget.sigmoid() * cell + entry.sigmoid() * new.tanh()
            hidden = exit_gate.sigmoid() * cell.tanh()
        return self.head(hidden)


def _classification(model: nn.Module, images: Tensor, labels: Tensor) -> Tensor:
    outputs = model(images)
    if isinstance(outputs, Tensor):
        return F.cross_entropy(outputs, labels)
    main, *others = (F.cross_entropy(output, labels) for output in outputs)
    return main + 0.3 * sum(others)


def _segmentation(model: nn.Module, images: Tensor, labels: Tensor) -> Tensor:
    outputs = model(images)
    return F.cross_entropy(outputs, _cropped(labels, outputs))


def own_loss(model: nn.Module, **batch: Tensor) -> Tensor:
    return model(**batch).loss


def _images(_: nn.Module, batch: int, size: int, classes: int = _CLASSES, name: str = "images") -> Batch:
    return {name: torch.randn(batch, 3, size, size), "labels": torch.randint(0, classes, (batch,))}


def _masks(_: nn.Module, batch: int, size: int) -> Batch:
    return {"images": torch.randn(batch, 1, size, size), "labels": torch.randint(0, 2, (batch, size, size))}


def _channels_last(x: Tensor) -> Tensor:
    return x.to(memory_format=torch.channels_last) if x.dim() == 4 else x


def _series(model: nn.Module, batch: int, size: int) -> Batch:
    features = cast(nn.Linear, model.get_submodule("head")).out_features
    return {"x": torch.randn(size, batch, features), "y": torch.randn(batch, features)}


def _text(model: nn.Module, batch: int, size: int) -> Batch:
    config: Any = model.config
    ids = torch.randint(3, config.vocab_size, (batch, size))
    return {"input_ids": ids, "labels": ids}


def _sentences(model: nn.Module, batch: int, size: int) -> Batch:
    return _text(model, batch, size) | {"labels": torch.randint(0, 2, (batch,))}


def _pictures(model: nn.Module, batch: int, size: int) -> Batch:
    return _images(model, batch, size, classes=2, name="pixel_values")


@dataclass(frozen=True)
class Shape:
    """A size of a model, by the arguments of its constructor, and of its batch."""

    options: dict[str, Any]
    batch: int
    # pixels of a side, tokens, or steps
    size: int
    # whether a mask says that sentences are shorter than `size`, down to half of it
    is_padded: bool = False


@dataclass(frozen=True)
class Workload:
    """A model, its loss and its batches."""

    name: str
    # called with a shape's options
    build: Callable[..., nn.Module]
    # called with the model, and the batch and the size of a shape
    sample: Callable[[nn.Module, int, int], Batch]
    # called as `step(model, **batch)`, returns the loss
    step: Callable[..., Tensor]
    # "published" is planned only, "small" runs op by op, all others are kinds of `steps.py`
    shapes: dict[str, Shape]
    # the name at the published size, where that is another one
    published: str = field(default="", kw_only=True)
    # the names of modules that users checkpoint one by one; None where `gradient_checkpointing_enable` does it
    blocks: str | None = field(default=None, kw_only=True)

    @property
    def title(self) -> str:
        """The name at the published size."""
        return self.published or self.name

    def at(self, shape: Shape) -> tuple[nn.Module, Batch]:
        torch.manual_seed(0)
        model = self.build(**shape.options).train()
        batch = self.sample(model, shape.batch, shape.size)
        if shape.is_padded:
            lengths = torch.randint(shape.size // 2, shape.size + 1, (shape.batch, 1))
            batch["attention_mask"] = (torch.arange(shape.size) < lengths).long()
        return model, batch

    def without_contents(self, shape: Shape) -> tuple[nn.Module, Batch]:
        """Build the model and a batch without contents, which take no memory: enough for a capture."""
        with FakeTensorMode(allow_non_fake_inputs=True):
            return self.at(shape)


def _shapes(published: tuple[int, int], small: tuple[float, int, int], **more: Shape) -> dict[str, Shape]:
    width, batch, size = small
    return {"published": Shape({}, *published), "small": Shape({"width": width}, batch, size), **more}


def _transformer(name: str, family: str, head: str, sample: Any, shapes: dict[str, Shape], **more: Any) -> Workload:
    def build(**options: Any) -> nn.Module:
        import transformers

        return getattr(transformers, family + head)(getattr(transformers, f"{family}Config")(**options))

    return Workload(name, build, sample, own_loss, shapes, **more)


def _layers(width: int, inner: int, layers: int, heads: int, **options: Any) -> dict[str, Any]:
    names = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
    return dict(zip(names, (width, inner, layers, heads), strict=True)) | options


_WORDS = {"vocab_size": 512}
_MANY_WORDS = {"vocab_size": 1000}
_NO_DROPOUT: dict[str, Any] = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
# a model that finds it out in its first step is compiled a second time
_NO_DROPOUT |= {"problem_type": "single_label_classification"}
_GPT2 = {"n_head": 4, "n_positions": 128, "use_cache": False}
_GPT2_NO_DROPOUT = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
_GPT2_WIDE = {"n_embd": 768, "n_head": 12, "use_cache": False} | _MANY_WORDS | _GPT2_NO_DROPOUT
_LLAMA_WIDE = {"num_key_value_heads": 12, "use_cache": False} | _MANY_WORDS
_ROBERTA_WIDE = _layers(768, 3072, 12, 12, **_MANY_WORDS, **_NO_DROPOUT)
_T5_WIDE: dict[str, Any] = {"d_model": 768, "d_kv": 64, "d_ff": 3072, "num_heads": 12, "dropout_rate": 0.0}
_T5_WIDE |= {"use_cache": False, "decoder_start_token_id": 0} | _MANY_WORDS
_MODERNBERT: dict[str, Any] = {"problem_type": "single_label_classification"} | _MANY_WORDS
_MODERNBERT |= dict.fromkeys(("pad_token_id", "bos_token_id", "cls_token_id", "eos_token_id", "sep_token_id"), 0)
_STAGES, _LEVELS = r"stages\.\d+", r"(down|merged)\.\d+"
# batches of the published image models: Kusumoto et al. 2019, table 1
WORKLOADS = (
    *(
        Workload(
            f"resnet-{number}",
            lambda depths=depths, **options: resnet(depths, **options),
            *(_images, _classification, _shapes((batch, 224), (0.25, 8, size))),
            blocks=_STAGES + r"\.\d+",
        )
        for number, depths, batch, size in ((50, (3, 4, 6, 3), 96, 128), (152, (3, 8, 36, 3), 48, 96))
    ),
    Workload("vgg-19", vgg19, _images, _classification, _shapes((64, 224), (0.125, 16, 96)), blocks=_STAGES),
    Workload(
        *("densenet-161", densenet161, _images, _classification, _shapes((32, 224), (0.25, 8, 96))),
        blocks=_STAGES + r"\.layers\.\d+",
    ),
    Workload("googlenet", GoogLeNet, _images, _classification, _shapes((256, 224), (0.25, 8, 128)), blocks=_STAGES),
    Workload(
        *("u-net", UNet, _masks, _segmentation),
        _shapes((8, 572), (0.125, 2, 220), compiled=Shape({"width": 0.25}, 4, 284)),
        blocks=_LEVELS,
    ),
    Workload(
        "u-net, channels_last",
        lambda **options: cast(Any, UNet(**options)).to(memory_format=torch.channels_last),
        lambda *sizes: {name: _channels_last(tensor) for name, tensor in _masks(*sizes).items()},
        *(_segmentation, {"compiled": Shape({"width": 0.25}, 4, 284)}),
        blocks=_LEVELS,
    ),
    _transformer(
        *("gpt-2", "GPT2", "LMHeadModel", _text),
        {
            "published": Shape({"use_cache": False}, 8, 1024),
            "small": Shape(_GPT2 | _WORDS | {"n_layer": 6, "n_embd": 128}, 8, 128),
            "compiled": Shape(_GPT2 | _WORDS | _GPT2_NO_DROPOUT | {"n_layer": 6, "n_embd": 256}, 14, 128),
            "codes": Shape(_GPT2_WIDE | {"n_layer": 4, "n_positions": 128}, 16, 128),
            "codes, cuda": Shape(
                _GPT2_WIDE | {"n_embd": 1024, "n_head": 16, "n_layer": 4, "n_positions": 1024}, 16, 1024
            ),
        },
    ),
    _transformer(
        *("llama", "Llama", "ForCausalLM", _text),
        {
            "published": Shape(
                _layers(2048, 8192, 16, 32, num_key_value_heads=8, use_cache=False)
                | {"vocab_size": 128256, "tie_word_embeddings": True},
                8,
                2048,
            ),
            "small": Shape(_layers(128, 512, 16, 4, num_key_value_heads=2, use_cache=False, **_WORDS), 8, 128),
            "compiled": Shape(_layers(256, 768, 6, 4, num_key_value_heads=2, use_cache=False, **_WORDS), 12, 128),
            "codes": Shape(_layers(768, 2048, 4, 12, **_LLAMA_WIDE), 16, 128),
            "codes, cuda": Shape(_layers(2048, 5632, 4, 16, **_LLAMA_WIDE | {"num_key_value_heads": 16}), 8, 1024),
        },
        published="llama, 16 blocks",
    ),
    _transformer(
        *("roberta", "Roberta", "ForSequenceClassification", _sentences),
        {
            "published": Shape({"max_position_embeddings": 514}, 32, 128),
            "small": Shape(_layers(128, 512, 12, 4, max_position_embeddings=130, **_WORDS), 8, 128),
            "compiled": Shape(_layers(256, 1024, 6, 4, max_position_embeddings=130, **_WORDS, **_NO_DROPOUT), 16, 128),
            "codes": Shape(_ROBERTA_WIDE | {"max_position_embeddings": 132}, 16, 128, is_padded=True),
            "codes, cuda": Shape(
                _layers(1024, 4096, 4, 16, max_position_embeddings=516, **_MANY_WORDS, **_NO_DROPOUT),
                32,
                512,
                is_padded=True,
            ),
        },
        published="roberta-base",
    ),
    _transformer(
        *("vit", "ViT", "ForImageClassification", _pictures),
        {
            "compiled": Shape(_layers(256, 1024, 6, 4, image_size=96, patch_size=8, **_NO_DROPOUT), 16, 96),
            "codes": Shape(_layers(768, 3072, 4, 12, image_size=96, patch_size=8, **_NO_DROPOUT), 16, 96),
            "codes, cuda": Shape(_layers(1024, 4096, 4, 16, **_NO_DROPOUT), 128, 224),
        },
    ),
    _transformer(
        *("t5", "T5", "ForConditionalGeneration", _text),
        {
            "codes": Shape(_T5_WIDE | {"num_layers": 2}, 16, 128),
            "codes, cuda": Shape(_T5_WIDE | {"d_model": 1024, "d_ff": 4096, "num_heads": 16, "num_layers": 2}, 16, 512),
        },
    ),
    _transformer(
        *("modernbert", "ModernBert", "ForSequenceClassification", _sentences),
        {
            "codes": Shape(_layers(768, 1152, 4, 12, **_MODERNBERT), 16, 128, is_padded=True),
            "codes, cuda": Shape(_layers(1024, 2624, 4, 16, **_MODERNBERT), 32, 512, is_padded=True),
        },
    ),
    # the paper's tables of memory have this batch
    *(
        _transformer(
            *(name, "Roberta", "ForSequenceClassification", _sentences),
            {"codes, cuda": Shape(size | {"max_position_embeddings": 514} | _NO_DROPOUT, 128, 128, is_padded=True)},
        )
        for name, size in (("minilm", _layers(384, 1536, 6, 12)), ("roberta-base", _layers(768, 3072, 12, 12)))
    ),
    Workload(
        *("lstm", LSTMLoop, _series, lambda model, x, y: F.mse_loss(model(x), y)),
        {
            "published": Shape({"inputs": 64, "hidden": 256}, 32, 1000),
            "small": Shape({"inputs": 16, "hidden": 64}, 16, 1000),
        },
    ),
)


def of_shape(key: str) -> tuple[Workload, ...]:
    return tuple(workload for workload in WORKLOADS if key in workload.shapes)
