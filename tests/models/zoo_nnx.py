"""Well-known networks in nnx, small and of any width, for tests and benchmarks.

Names of attributes follow torchvision's. ``model.train()`` and ``model.eval()`` switch the batch
norms, as in Flax. ``zoo_linen`` has the same networks in linen.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

Activation = Callable[[jax.Array], jax.Array]


def conv(inputs: int, outputs: int, size: int, stride: int = 1, **kinds: Any) -> nnx.Conv:
    """Return a convolution without bias, with the padding that torchvision gives it."""
    pad = (size - 1) // 2
    window = (size, size)
    return nnx.Conv(
        inputs, outputs, window, stride, padding=((pad, pad),) * 2, use_bias=False, **kinds
    )


def norm(features: int, **kinds: Any) -> nnx.BatchNorm:
    """Return a batch norm with PyTorch's constants."""
    return nnx.BatchNorm(features, momentum=0.9, epsilon=1e-5, **kinds)


class Downsample(nnx.Module):
    """A shortcut's projection: a 1x1 convolution and a batch norm."""

    def __init__(self, inputs: int, outputs: int, stride: int, **kinds: Any) -> None:
        self.conv = conv(inputs, outputs, 1, stride, **kinds)
        self.bn = norm(outputs, **kinds)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.bn(self.conv(x))


def pad_channels(x: jax.Array, channels: int, stride: int) -> jax.Array:
    """Return a shortcut without parameters: every ``stride``-th pixel, zeros for new channels."""
    more = channels - x.shape[-1]
    x = x[:, ::stride, ::stride]
    return jnp.pad(x, ((0, 0), (0, 0), (0, 0), (more // 2, more - more // 2)))


class BasicBlock(nnx.Module):
    """Two 3x3 convolutions, as in ResNet-18 and in the ResNets for CIFAR."""

    expansion = 1

    def __init__(
        self, inputs: int, width: int, stride: int, shortcut: str, act: Activation, **kinds: Any
    ) -> None:
        self.conv1 = conv(inputs, width, 3, stride, **kinds)
        self.bn1 = norm(width, **kinds)
        self.conv2 = conv(width, width, 3, **kinds)
        self.bn2 = norm(width, **kinds)
        changes = stride != 1 or inputs != width
        project = changes and shortcut == "conv"
        self.downsample = Downsample(inputs, width, stride, **kinds) if project else None
        self.outputs, self.stride, self.act = width, stride, act

    def __call__(self, x: jax.Array) -> jax.Array:
        y = self.act(self.bn1(self.conv1(x)))
        y = self.bn2(self.conv2(y))
        if self.downsample is not None:
            x = self.downsample(x)
        elif x.shape != y.shape:
            x = pad_channels(x, self.outputs, self.stride)
        return self.act(x + y)


class Bottleneck(nnx.Module):
    """1x1, 3x3 and 1x1 convolutions, as in ResNet-50."""

    expansion = 4

    def __init__(
        self, inputs: int, width: int, stride: int, shortcut: str, act: Activation, **kinds: Any
    ) -> None:
        outputs = 4 * width
        self.conv1 = conv(inputs, width, 1, **kinds)
        self.bn1 = norm(width, **kinds)
        self.conv2 = conv(width, width, 3, stride, **kinds)
        self.bn2 = norm(width, **kinds)
        self.conv3 = conv(width, outputs, 1, **kinds)
        self.bn3 = norm(outputs, **kinds)
        changes = stride != 1 or inputs != outputs
        project = changes and shortcut == "conv"
        self.downsample = Downsample(inputs, outputs, stride, **kinds) if project else None
        self.outputs, self.stride, self.act = outputs, stride, act

    def __call__(self, x: jax.Array) -> jax.Array:
        y = self.act(self.bn1(self.conv1(x)))
        y = self.act(self.bn2(self.conv2(y)))
        y = self.bn3(self.conv3(y))
        if self.downsample is not None:
            x = self.downsample(x)
        elif x.shape != y.shape:
            x = pad_channels(x, self.outputs, self.stride)
        return self.act(x + y)


class ResNet(nnx.Module):
    """K. He et al., "Deep Residual Learning for Image Recognition", 2016.

    Args:
      block: ``BasicBlock`` or ``Bottleneck``.
      stages: number of blocks of each stage; each stage is twice as wide as the one before.
      width: channels of the first stage.
      classes: outputs.
      image_net: a 7x7 stem with stride 2 and a max-pool, instead of a 3x3 one.
      shortcut: ``"conv"`` (projection with a norm) or ``"pad"`` (no parameters).
      act: the activation.
      dtype: the dtype of the computation, or None.
    """

    def __init__(
        self,
        block: Any,
        stages: Sequence[int],
        *,
        rngs: nnx.Rngs,
        width: int = 16,
        classes: int = 10,
        image_net: bool = False,
        shortcut: str = "conv",
        act: Activation = nnx.relu,
        dtype: Any = None,
    ) -> None:
        kinds: dict[str, Any] = {"rngs": rngs, "dtype": dtype}
        stem = (7, 2) if image_net else (3, 1)
        self.conv1 = conv(3, width, *stem, **kinds)
        self.bn1 = norm(width, **kinds)
        channels, self.stages = width, len(stages)
        for stage, blocks in enumerate(stages):
            made = []
            for i in range(blocks):
                stride = 2 if stage and not i else 1
                inner = width * 2**stage
                made.append(block(channels, inner, stride, shortcut, act, **kinds))
                channels = inner * block.expansion
            setattr(self, f"layer{stage + 1}", nnx.List(made))
        self.fc = nnx.Linear(channels, classes, **kinds)
        self.image_net, self.act = image_net, act

    def __call__(self, x: jax.Array) -> jax.Array:
        x = self.act(self.bn1(self.conv1(x)))
        if self.image_net:
            border: Any = ((1, 1), (1, 1))  # its hint says str
            x = nnx.max_pool(x, (3, 3), (2, 2), border)
        for stage in range(self.stages):
            for block in getattr(self, f"layer{stage + 1}"):
                x = block(x)
        return self.fc(x.mean((1, 2)))


resnet8 = functools.partial(ResNet, BasicBlock, (1, 1, 1))
resnet20 = functools.partial(ResNet, BasicBlock, (3, 3, 3))
resnet18 = functools.partial(ResNet, BasicBlock, (2, 2, 2, 2), image_net=True)
resnet50 = functools.partial(ResNet, Bottleneck, (3, 4, 6, 3), image_net=True)


class InvertedResidual(nnx.Module):
    """Expand, depthwise, project; added to its input where the shapes allow it."""

    def __init__(self, inputs: int, outputs: int, stride: int, expand: int, **kinds: Any) -> None:
        inner = inputs * expand
        self.conv1 = conv(inputs, inner, 1, **kinds)
        self.bn1 = norm(inner, **kinds)
        self.conv2 = conv(inner, inner, 3, stride, feature_group_count=inner, **kinds)
        self.bn2 = norm(inner, **kinds)
        self.conv3 = conv(inner, outputs, 1, **kinds)
        self.bn3 = norm(outputs, **kinds)
        self.residual = stride == 1 and inputs == outputs

    def __call__(self, x: jax.Array) -> jax.Array:
        y = nnx.relu6(self.bn1(self.conv1(x)))
        y = nnx.relu6(self.bn2(self.conv2(y)))
        y = self.bn3(self.conv3(y))
        return x + y if self.residual else y


class MobileNetV2(nnx.Module):
    """M. Sandler et al., "MobileNetV2: Inverted Residuals and Linear Bottlenecks", 2018; shorter.

    Args:
      blocks: pairs of output channels (in multiples of ``width``) and stride.
      width: channels of the stem.
      expand: factor of the inner channels.
      classes: outputs.
      dtype: the dtype of the computation, or None.
    """

    def __init__(
        self,
        *,
        rngs: nnx.Rngs,
        blocks: Sequence[tuple[int, int]] = ((1, 1), (2, 2), (2, 1), (4, 2), (4, 1)),
        width: int = 8,
        expand: int = 4,
        classes: int = 10,
        dtype: Any = None,
    ) -> None:
        kinds: dict[str, Any] = {"rngs": rngs, "dtype": dtype}
        self.conv1 = conv(3, width, 3, **kinds)
        self.bn1 = norm(width, **kinds)
        channels, made = width, []
        for factor, stride in blocks:
            made.append(InvertedResidual(channels, factor * width, stride, expand, **kinds))
            channels = factor * width
        self.blocks = nnx.List(made)
        self.conv2 = conv(channels, 4 * channels, 1, **kinds)
        self.bn2 = norm(4 * channels, **kinds)
        self.classifier = nnx.Linear(4 * channels, classes, **kinds)

    def __call__(self, x: jax.Array) -> jax.Array:
        x = nnx.relu6(self.bn1(self.conv1(x)))
        for block in self.blocks:
            x = block(x)
        x = nnx.relu6(self.bn2(self.conv2(x)))
        return self.classifier(x.mean((1, 2)))


class DenseLayer(nnx.Module):
    """Norm, ReLU, 1x1, norm, ReLU, 3x3; the result is appended to the input's channels."""

    def __init__(self, inputs: int, growth: int, **kinds: Any) -> None:
        self.norm1 = norm(inputs, **kinds)
        self.conv1 = conv(inputs, 4 * growth, 1, **kinds)
        self.norm2 = norm(4 * growth, **kinds)
        self.conv2 = conv(4 * growth, growth, 3, **kinds)

    def __call__(self, x: jax.Array) -> jax.Array:
        y = self.conv1(nnx.relu(self.norm1(x)))
        y = self.conv2(nnx.relu(self.norm2(y)))
        return jnp.concatenate([x, y], -1)


class DenseNet(nnx.Module):
    """G. Huang et al., "Densely Connected Convolutional Networks", 2017; two blocks, a transition.

    Args:
      layers: dense layers of each block.
      growth: channels that a layer adds.
      classes: outputs.
      dtype: the dtype of the computation, or None.
    """

    def __init__(
        self,
        *,
        rngs: nnx.Rngs,
        layers: tuple[int, int] = (2, 2),
        growth: int = 4,
        classes: int = 10,
        dtype: Any = None,
    ) -> None:
        kinds: dict[str, Any] = {"rngs": rngs, "dtype": dtype}
        channels = 2 * growth
        self.conv0 = conv(3, channels, 3, **kinds)
        self.norm0 = norm(channels, **kinds)
        ends = (channels + growth * layers[0], channels + growth * layers[0] // 2)
        self.block1 = nnx.List(
            DenseLayer(channels + i * growth, growth, **kinds) for i in range(layers[0])
        )
        self.norm_transition = norm(ends[0], **kinds)
        self.conv_transition = conv(ends[0], ends[1], 1, **kinds)
        self.block2 = nnx.List(
            DenseLayer(ends[1] + i * growth, growth, **kinds) for i in range(layers[1])
        )
        last = ends[1] + growth * layers[1]
        self.norm5 = norm(last, **kinds)
        self.classifier = nnx.Linear(last, classes, **kinds)

    def __call__(self, x: jax.Array) -> jax.Array:
        x = nnx.relu(self.norm0(self.conv0(x)))
        for layer in self.block1:
            x = layer(x)
        x = self.conv_transition(nnx.relu(self.norm_transition(x)))
        x = nnx.avg_pool(x, (2, 2), (2, 2))
        for layer in self.block2:
            x = layer(x)
        return self.classifier(nnx.relu(self.norm5(x)).mean((1, 2)))


class ViTBlock(nnx.Module):
    """Pre-norm attention and MLP, each added to its input."""

    def __init__(self, width: int, heads: int, **kinds: Any) -> None:
        self.norm1 = nnx.LayerNorm(width, **kinds)
        self.attn = nnx.MultiHeadAttention(heads, width, decode=False, **kinds)
        self.norm2 = nnx.LayerNorm(width, **kinds)
        self.fc1 = nnx.Linear(width, 2 * width, **kinds)
        self.fc2 = nnx.Linear(2 * width, width, **kinds)

    def __call__(self, x: jax.Array) -> jax.Array:
        x = x + self.attn(self.norm1(x))
        return x + self.fc2(nnx.gelu(self.fc1(self.norm2(x))))


class ViT(nnx.Module):
    """A. Dosovitskiy et al., "An Image is Worth 16x16 Words", 2021; pooled by the mean.

    Args:
      depth: blocks.
      width: channels.
      heads: attention heads.
      patch: side of a patch in pixels.
      image: side of the image in pixels.
      classes: outputs.
      dtype: the dtype of the computation, or None.
    """

    def __init__(
        self,
        *,
        rngs: nnx.Rngs,
        depth: int = 2,
        width: int = 16,
        heads: int = 2,
        patch: int = 4,
        image: int = 8,
        classes: int = 10,
        dtype: Any = None,
    ) -> None:
        kinds: dict[str, Any] = {"rngs": rngs, "dtype": dtype}
        window = (patch, patch)
        self.patch_embed = nnx.Conv(3, width, window, window, padding="VALID", **kinds)
        places = (image // patch) ** 2
        self.pos_embed = nnx.Param(0.02 * jax.random.normal(rngs.params(), (1, places, width)))
        self.blocks = nnx.List(ViTBlock(width, heads, **kinds) for _ in range(depth))
        self.norm = nnx.LayerNorm(width, **kinds)
        self.head = nnx.Linear(width, classes, **kinds)

    def __call__(self, x: jax.Array) -> jax.Array:
        x = self.patch_embed(x)
        x = x.reshape(x.shape[0], -1, x.shape[-1])
        x = x + jnp.broadcast_to(self.pos_embed[...], x.shape)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x).mean(1))
