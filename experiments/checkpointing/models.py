"""The models that are compared: the published architectures in plain torch, and Hugging Face's Transformers.

Image models are of torchvision's shapes; `width` scales their channels, so that on a small machine activations still
outweigh parameters. What a step returns is its loss alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from .baselines import BUDGETS

_CLASSES = 1000


def _conv(inputs: int, outputs: int, kernel: int, **options: Any) -> nn.Sequential:
    """Convolution, batch norm, ReLU."""
    conv = nn.Conv2d(inputs, outputs, kernel, bias=False, **options)
    return nn.Sequential(conv, nn.BatchNorm2d(outputs), nn.ReLU(inplace=True))


class Bottleneck(nn.Module):
    """A residual block of ResNet-50 and deeper (He et al. 2015), the stride on its 3x3 convolution."""

    def __init__(self, inputs: int, channels: int, stride: int) -> None:
        super().__init__()
        self.first = _conv(inputs, channels, 1)
        self.second = _conv(channels, channels, 3, stride=stride, padding=1)
        self.third = nn.Sequential(nn.Conv2d(channels, 4 * channels, 1, bias=False), nn.BatchNorm2d(4 * channels))
        self.shortcut = nn.Sequential()
        if stride > 1 or inputs != 4 * channels:
            projection = nn.Conv2d(inputs, 4 * channels, 1, stride=stride, bias=False)
            self.shortcut = nn.Sequential(projection, nn.BatchNorm2d(4 * channels))

    def forward(self, x: Tensor) -> Tensor:
        """Run the forward pass."""
        return F.relu(self.third(self.second(self.first(x))) + self.shortcut(x), inplace=True)


class ResNet(nn.Module):
    """He et al. 2015.

    Args:
        depths: Blocks of each stage.
        width: Factor of all channels.
    """

    def __init__(self, depths: Sequence[int], width: float = 1.0) -> None:
        super().__init__()
        channels = int(64 * width)
        self.stem = nn.Sequential(_conv(3, channels, 7, stride=2, padding=3), nn.MaxPool2d(3, 2, 1))
        stages, inputs = [], channels
        for stage, depth in enumerate(depths):
            blocks = []
            for place in range(depth):
                blocks.append(Bottleneck(inputs, channels << stage, 2 if stage and not place else 1))
                inputs = 4 * (channels << stage)
            stages.append(nn.Sequential(*blocks))
        self.stages = nn.Sequential(*stages)
        self.head = nn.Linear(inputs, _CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        """Run the forward pass."""
        return self.head(self.stages(self.stem(x)).mean((2, 3)))


class VGG19(nn.Module):
    """Simonyan and Zisserman 2014, configuration E, without batch norm.

    Args:
        width: Factor of all channels, hidden layers of the classifier included.
    """

    def __init__(self, width: float = 1.0) -> None:
        super().__init__()
        stages, inputs = [], 3
        for channels, depth in ((64, 2), (128, 2), (256, 4), (512, 4), (512, 4)):
            layers: list[nn.Module] = []
            for _ in range(depth):
                layers += [nn.Conv2d(inputs, int(channels * width), 3, padding=1), nn.ReLU(inplace=True)]
                inputs = int(channels * width)
            stages.append(nn.Sequential(*layers, nn.MaxPool2d(2)))
        self.stages = nn.Sequential(*stages)
        hidden = int(4096 * width)
        self.head = nn.Sequential(
            *(nn.Linear(inputs * 49, hidden), nn.ReLU(inplace=True), nn.Dropout()),
            *(nn.Linear(hidden, hidden), nn.ReLU(inplace=True), nn.Dropout()),
            nn.Linear(hidden, _CLASSES),
        )

    def forward(self, x: Tensor) -> Tensor:
        """Run the forward pass."""
        return self.head(F.adaptive_avg_pool2d(self.stages(x), 7).flatten(1))


class DenseLayer(nn.Module):
    """A layer of a dense block: what comes in, and `growth` more channels."""

    def __init__(self, inputs: int, growth: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            *(nn.BatchNorm2d(inputs), nn.ReLU(inplace=True), nn.Conv2d(inputs, 4 * growth, 1, bias=False)),
            *(nn.BatchNorm2d(4 * growth), nn.ReLU(inplace=True)),
            nn.Conv2d(4 * growth, growth, 3, padding=1, bias=False),
        )

    def forward(self, *features: Tensor) -> Tensor:
        """Run the forward pass."""
        return self.layers(torch.cat(features, 1))


class DenseBlock(nn.Module):
    """Layers each of which reads what all before it wrote."""

    def __init__(self, inputs: int, growth: int, depth: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(DenseLayer(inputs + place * growth, growth) for place in range(depth))

    def forward(self, x: Tensor) -> Tensor:
        """Run the forward pass."""
        features = [x]
        for layer in self.layers:
            features.append(layer(*features))
        return torch.cat(features, 1)


class DenseNet161(nn.Module):
    """Huang et al. 2016: growth 48, 96 channels first.

    Args:
        width: Factor of all channels.
        depths: Layers of each block.
    """

    def __init__(self, width: float = 1.0, depths: Sequence[int] = (6, 12, 36, 24)) -> None:
        super().__init__()
        channels, growth = int(96 * width), int(48 * width)
        self.stem = nn.Sequential(_conv(3, channels, 7, stride=2, padding=3), nn.MaxPool2d(3, 2, 1))
        stages: list[nn.Module] = []
        for place, depth in enumerate(depths):
            stages.append(DenseBlock(channels, growth, depth))
            channels += depth * growth
            if place + 1 < len(depths):
                conv = nn.Conv2d(channels, channels // 2, 1, bias=False)
                stages.append(nn.Sequential(nn.BatchNorm2d(channels), nn.ReLU(inplace=True), conv, nn.AvgPool2d(2)))
                channels //= 2
        self.stages = nn.Sequential(*stages)
        self.norm = nn.BatchNorm2d(channels)
        self.head = nn.Linear(channels, _CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        """Run the forward pass."""
        return self.head(F.relu(self.norm(self.stages(self.stem(x))), inplace=True).mean((2, 3)))


class Inception(nn.Module):
    """A block of GoogLeNet: four branches side by side."""

    def __init__(self, inputs: int, *channels: int) -> None:
        super().__init__()
        one, before_three, three, before_five, five, pooled = channels
        self.one = _conv(inputs, one, 1)
        self.three = nn.Sequential(_conv(inputs, before_three, 1), _conv(before_three, three, 3, padding=1))
        # 3x3 where the paper has 5x5, as in torchvision: the published number of parameters is that one's
        self.five = nn.Sequential(_conv(inputs, before_five, 1), _conv(before_five, five, 3, padding=1))
        self.pooled = nn.Sequential(nn.MaxPool2d(3, 1, 1), _conv(inputs, pooled, 1))

    def forward(self, x: Tensor) -> Tensor:
        """Run the forward pass."""
        return torch.cat([self.one(x), self.three(x), self.five(x), self.pooled(x)], 1)


class AuxiliaryHead(nn.Module):
    """A classifier on features in the middle of GoogLeNet."""

    def __init__(self, inputs: int, width: float) -> None:
        super().__init__()
        self.conv = _conv(inputs, int(128 * width), 1)
        hidden = int(1024 * width)
        self.head = nn.Sequential(
            *(nn.Linear(int(128 * width) * 16, hidden), nn.ReLU(inplace=True), nn.Dropout(0.7)),
            nn.Linear(hidden, _CLASSES),
        )

    def forward(self, x: Tensor) -> Tensor:
        """Run the forward pass."""
        return self.head(self.conv(F.adaptive_avg_pool2d(x, 4)).flatten(1))


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
# blocks that an auxiliary head comes after
_AUXILIARY = (3, 6)


class GoogLeNet(nn.Module):
    """Szegedy et al. 2014, with batch norm.

    Args:
        width: Factor of all channels.
        auxiliary: Whether to have the two heads in the middle; `forward` then returns three outputs.
    """

    def __init__(self, width: float = 1.0, *, auxiliary: bool = True) -> None:
        super().__init__()
        channels = int(64 * width)
        self.stem = nn.Sequential(
            *(_conv(3, channels, 7, stride=2, padding=3), nn.MaxPool2d(3, 2, ceil_mode=True)),
            *(_conv(channels, channels, 1), _conv(channels, 3 * channels, 3, padding=1)),
            nn.MaxPool2d(3, 2, ceil_mode=True),
        )
        inputs = 3 * channels
        self.stages = nn.ModuleList()
        self.auxiliary = nn.ModuleDict()
        for place, shape in enumerate(_GOOGLENET):
            if shape is None:
                self.stages.append(nn.MaxPool2d(3 if place == 2 else 2, 2, ceil_mode=True))
                continue
            scaled = [int(each * width) for each in shape]
            self.stages.append(Inception(inputs, *scaled))
            inputs = scaled[0] + scaled[2] + scaled[4] + scaled[5]
            if auxiliary and place in _AUXILIARY:
                self.auxiliary[str(place)] = AuxiliaryHead(inputs, width)
        self.head = nn.Sequential(nn.Dropout(0.2), nn.Linear(inputs, _CLASSES))

    def forward(self, x: Tensor) -> list[Tensor]:
        """Run the forward pass."""
        x = self.stem(x)
        outputs = []
        for place, stage in enumerate(self.stages):
            x = stage(x)
            if str(place) in self.auxiliary:
                outputs.append(self.auxiliary[str(place)](x))
        return [self.head(x.mean((2, 3))), *outputs]


class UNet(nn.Module):
    """Ronneberger et al. 2015: convolutions without padding, features of the way down cropped for the way up.

    Args:
        width: Factor of all channels.
        classes: Classes of a pixel.
    """

    def __init__(self, width: float = 1.0, classes: int = 2) -> None:
        super().__init__()
        channels = [int(64 * width) << level for level in range(5)]
        self.down = nn.ModuleList(self._pair(inputs, c) for inputs, c in zip([1, *channels], channels, strict=False))
        self.up = nn.ModuleList(nn.ConvTranspose2d(2 * c, c, 2, stride=2) for c in reversed(channels[:-1]))
        self.merged = nn.ModuleList(self._pair(2 * c, c) for c in reversed(channels[:-1]))
        self.head = nn.Conv2d(channels[0], classes, 1)

    @staticmethod
    def _pair(inputs: int, outputs: int) -> nn.Sequential:
        return nn.Sequential(
            *(nn.Conv2d(inputs, outputs, 3), nn.ReLU(inplace=True)),
            *(nn.Conv2d(outputs, outputs, 3), nn.ReLU(inplace=True)),
        )

    def forward(self, x: Tensor) -> Tensor:
        """Run the forward pass."""
        features = []
        for level, pair in enumerate(self.down):
            x = pair(F.max_pool2d(x, 2) if level else x)
            features.append(x)
        features.pop()
        for up, merged in zip(self.up, self.merged, strict=True):
            x = up(x)
            beside = features.pop()
            top, left = ((beside.shape[axis] - x.shape[axis]) // 2 for axis in (2, 3))
            x = merged(torch.cat([beside[:, :, top : top + x.shape[2], left : left + x.shape[3]], x], 1))
        return self.head(x)


class LSTMLoop(nn.Module):
    """An LSTM cell in a loop over time, as Gruslys et al. 2016 train it.

    Args:
        inputs: Features of a time step.
        hidden: Features of the state.
    """

    def __init__(self, inputs: int, hidden: int) -> None:
        super().__init__()
        self.inputs = nn.Linear(inputs, 4 * hidden)
        self.state = nn.Linear(hidden, 4 * hidden, bias=False)
        self.head = nn.Linear(hidden, inputs)

    def forward(self, x: Tensor) -> Tensor:
        """Run the forward pass."""
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
    return main + 0.3 * sum(others) if others else main


def _segmentation(model: nn.Module, images: Tensor, labels: Tensor) -> Tensor:
    outputs = model(images)
    top, left = ((labels.shape[axis - 1] - outputs.shape[axis]) // 2 for axis in (2, 3))
    return F.cross_entropy(outputs, labels[:, top : top + outputs.shape[2], left : left + outputs.shape[3]])


def _regression(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return F.mse_loss(model(x), y)


def _language(model: nn.Module, ids: Tensor) -> Tensor:
    return model(input_ids=ids, labels=ids, use_cache=False).loss


def _sentence(model: nn.Module, ids: Tensor, labels: Tensor) -> Tensor:
    return model(input_ids=ids, labels=labels).loss


@dataclass(frozen=True)
class Shape:
    """A size of a model and of its batch.

    Attributes:
        options: What the model is built with.
        batch: Examples.
        size: Pixels of a side, tokens, or steps.
    """

    options: dict[str, Any]
    batch: int
    size: int


@dataclass(frozen=True)
class Workload:
    """A model, its loss and its batches.

    Attributes:
        name: Its name in tables.
        build: Makes the model of a shape's options, in training mode.
        sample: Makes a batch: (model, batch, size) to tensors.
        step: Called as `step(model, *batch)`, returns the loss.
        full: The shape that is planned only: published sizes.
        small: The shape that runs and is timed: narrower where it has to be, so that activations outweigh parameters.
        wide: The shape that runs at published widths: few examples, small images. None where one machine's memory is
            too little for it, or nothing is published.
        blocks: Patterns of module names that users checkpoint one by one, by name of the granularity; none where
            `gradient_checkpointing_enable` does it.
        is_hugging_face: Whether the model is one of transformers.
        budgets: Of torch's partitioner, those that are tried: torch.compile takes minutes for some.
    """

    name: str
    build: Callable[..., nn.Module]
    sample: Callable[[nn.Module, int, int], tuple[Tensor, ...]]
    step: Callable[..., Tensor]
    full: Shape
    small: Shape
    wide: Shape | None = None
    blocks: dict[str, str] = field(default_factory=dict)
    is_hugging_face: bool = False
    budgets: tuple[float, ...] = BUDGETS

    def at(self, shape: Shape) -> tuple[nn.Module, tuple[Tensor, ...]]:
        """Build the model and a batch."""
        torch.manual_seed(0)
        model = self.build(**shape.options).train()
        return model, self.sample(model, shape.batch, shape.size)

    @contextmanager
    def without_contents(self, shape: Shape) -> Iterator[tuple[nn.Module, tuple[Tensor, ...]]]:
        """Build the model and a batch without contents, which take no memory: enough for a capture."""
        with FakeTensorMode(allow_non_fake_inputs=True):
            model, batch = self.at(shape)
        yield model, batch


def _images(channels: int = 3) -> Callable[[nn.Module, int, int], tuple[Tensor, ...]]:
    def sample(_: nn.Module, batch: int, size: int) -> tuple[Tensor, ...]:
        return torch.randn(batch, channels, size, size), torch.randint(0, _CLASSES, (batch,))

    return sample


def _masks(_: nn.Module, batch: int, size: int) -> tuple[Tensor, ...]:
    return torch.randn(batch, 1, size, size), torch.randint(0, 2, (batch, size, size))


def _tokens(model: nn.Module, batch: int, size: int) -> tuple[Tensor, ...]:
    config: Any = model.config
    return (torch.randint(3, config.vocab_size, (batch, size)),)


def _labelled_tokens(model: nn.Module, batch: int, size: int) -> tuple[Tensor, ...]:
    return *_tokens(model, batch, size), torch.randint(0, 2, (batch,))


def _series(model: nn.Module, batch: int, size: int) -> tuple[Tensor, ...]:
    features = model.get_submodule("head").out_features
    return torch.randn(size, batch, features), torch.randn(batch, features)


def _gpt2(**options: Any) -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    return GPT2LMHeadModel(GPT2Config(**options))


def _llama(**options: Any) -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(LlamaConfig(**options))


def _roberta(**options: Any) -> nn.Module:
    from transformers import RobertaConfig, RobertaForSequenceClassification

    return RobertaForSequenceClassification(RobertaConfig(**options))


_QUARTER = {"width": 0.25}
_RESNET_BLOCKS = {"each block": r"stages\.\d+\.\d+", "each stage": r"stages\.\d+"}
# batches of the full image models: Kusumoto et al. 2019, table 1
WORKLOADS = (
    Workload(
        "resnet-50",
        lambda **options: ResNet((3, 4, 6, 3), **options),
        _images(),
        _classification,
        Shape({}, 96, 224),
        Shape(_QUARTER, 8, 128),
        Shape({}, 8, 160),
        _RESNET_BLOCKS,
    ),
    Workload(
        "resnet-152",
        lambda **options: ResNet((3, 8, 36, 3), **options),
        _images(),
        _classification,
        Shape({}, 48, 224),
        Shape(_QUARTER, 8, 96),
        Shape({}, 8, 128),
        _RESNET_BLOCKS,
    ),
    Workload(
        "vgg-19",
        VGG19,
        _images(),
        _classification,
        Shape({}, 64, 224),
        Shape({"width": 0.125}, 16, 96),
        Shape({}, 8, 96),
        {"each stage": r"stages\.\d+"},
    ),
    Workload(
        "densenet-161",
        DenseNet161,
        _images(),
        _classification,
        Shape({}, 32, 224),
        Shape(_QUARTER, 8, 96),
        Shape({}, 8, 128),
        {"each layer": r"stages\.\d+\.layers\.\d+", "each block": r"stages\.\d+"},
    ),
    Workload(
        "googlenet",
        GoogLeNet,
        _images(),
        _classification,
        Shape({}, 256, 224),
        Shape(_QUARTER, 8, 128),
        Shape({}, 16, 160),
        {"each block": r"stages\.\d+"},
    ),
    Workload(
        "u-net",
        UNet,
        _masks,
        _segmentation,
        Shape({}, 8, 572),
        Shape({"width": 0.125}, 2, 220),
        Shape({}, 1, 284),
        {"each level": r"(down|merged)\.\d+"},
    ),
    Workload(
        "gpt-2",
        _gpt2,
        _tokens,
        _language,
        Shape({}, 8, 1024),
        Shape({"n_layer": 6, "n_embd": 128, "n_head": 4, "vocab_size": 512, "n_positions": 128}, 8, 128),
        Shape({}, 2, 128),
        is_hugging_face=True,
    ),
    Workload(
        "llama, 16 blocks",
        _llama,
        _tokens,
        _language,
        Shape(
            {
                "hidden_size": 2048,
                "intermediate_size": 8192,
                "num_hidden_layers": 16,
                "num_attention_heads": 32,
                "num_key_value_heads": 8,
                "vocab_size": 128256,
                "tie_word_embeddings": True,
            },
            8,
            2048,
        ),
        Shape(
            {
                "hidden_size": 128,
                "intermediate_size": 512,
                "num_hidden_layers": 16,
                "num_attention_heads": 4,
                "num_key_value_heads": 2,
                "vocab_size": 512,
            },
            8,
            128,
        ),
        is_hugging_face=True,
    ),
    Workload(
        "roberta-base",
        _roberta,
        _labelled_tokens,
        _sentence,
        Shape({"max_position_embeddings": 514}, 32, 128),
        Shape(
            {
                "hidden_size": 128,
                "intermediate_size": 512,
                "num_attention_heads": 4,
                "vocab_size": 512,
                "max_position_embeddings": 130,
            },
            8,
            128,
        ),
        Shape({"max_position_embeddings": 514}, 8, 128),
        is_hugging_face=True,
    ),
    Workload(
        "lstm",
        lambda **options: LSTMLoop(**options),
        _series,
        _regression,
        Shape({"inputs": 64, "hidden": 256}, 32, 1000),
        Shape({"inputs": 16, "hidden": 64}, 16, 1000),
        budgets=(0.9, 0.3),
    ),
)
