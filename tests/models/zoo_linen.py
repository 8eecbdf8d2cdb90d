"""Well-known networks in linen, small and of any width, for tests and benchmarks.

Names of submodules follow torchvision's. ``net.apply(variables, x, train=False)`` evaluates.
``zoo_nnx`` has the same networks in nnx.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

Activation = Callable[[jax.Array], jax.Array]


def conv(outputs: int, size: int, stride: int = 1, **kinds: Any) -> nn.Conv:
    """Return a convolution without bias, with the padding that torchvision gives it."""
    pad = (size - 1) // 2
    window, strides = (size, size), (stride, stride)
    return nn.Conv(outputs, window, strides, padding=((pad, pad),) * 2, use_bias=False, **kinds)


def norm(train: bool, **kinds: Any) -> nn.BatchNorm:
    """Return a batch norm with PyTorch's constants."""
    return nn.BatchNorm(use_running_average=not train, momentum=0.9, epsilon=1e-5, **kinds)


class Downsample(nn.Module):
    """A shortcut's projection: a 1x1 convolution and a batch norm."""

    outputs: int
    stride: int
    dtype: Any = None

    @nn.compact
    def __call__(self, x: jax.Array, train: bool = True) -> jax.Array:
        x = conv(self.outputs, 1, self.stride, dtype=self.dtype, name="conv")(x)
        return norm(train, dtype=self.dtype, name="bn")(x)


def pad_channels(x: jax.Array, channels: int, stride: int) -> jax.Array:
    """Return a shortcut without parameters: every ``stride``-th pixel, zeros for new channels."""
    more = channels - x.shape[-1]
    x = x[:, ::stride, ::stride]
    return jnp.pad(x, ((0, 0), (0, 0), (0, 0), (more // 2, more - more // 2)))


class _Block(nn.Module):
    width: int
    stride: int
    shortcut: str
    act: Activation
    dtype: Any = None

    def join(self, x: jax.Array, y: jax.Array, train: bool) -> jax.Array:
        """Return the activation of main path and shortcut."""
        outputs = y.shape[-1]
        if x.shape != y.shape and self.shortcut == "conv":
            x = Downsample(outputs, self.stride, self.dtype, name="downsample")(x, train)
        elif x.shape != y.shape:
            x = pad_channels(x, outputs, self.stride)
        return self.act(x + y)


class BasicBlock(_Block):
    """Two 3x3 convolutions, as in ResNet-18 and in the ResNets for CIFAR."""

    @nn.compact
    def __call__(self, x: jax.Array, train: bool = True) -> jax.Array:
        kinds: dict[str, Any] = {"dtype": self.dtype}
        y = conv(self.width, 3, self.stride, name="conv1", **kinds)(x)
        y = self.act(norm(train, name="bn1", **kinds)(y))
        y = conv(self.width, 3, name="conv2", **kinds)(y)
        return self.join(x, norm(train, name="bn2", **kinds)(y), train)


class Bottleneck(_Block):
    """1x1, 3x3 and 1x1 convolutions, as in ResNet-50."""

    @nn.compact
    def __call__(self, x: jax.Array, train: bool = True) -> jax.Array:
        kinds: dict[str, Any] = {"dtype": self.dtype}
        y = conv(self.width, 1, name="conv1", **kinds)(x)
        y = self.act(norm(train, name="bn1", **kinds)(y))
        y = conv(self.width, 3, self.stride, name="conv2", **kinds)(y)
        y = self.act(norm(train, name="bn2", **kinds)(y))
        y = conv(4 * self.width, 1, name="conv3", **kinds)(y)
        return self.join(x, norm(train, name="bn3", **kinds)(y), train)


class ResNet(nn.Module):
    """K. He et al., "Deep Residual Learning for Image Recognition", 2016.

    Attributes:
      block: ``BasicBlock`` or ``Bottleneck``.
      stages: number of blocks of each stage; each stage is twice as wide as the one before.
      width: channels of the first stage.
      classes: outputs.
      image_net: a 7x7 stem with stride 2 and a max-pool, instead of a 3x3 one.
      shortcut: ``"conv"`` (projection with a norm) or ``"pad"`` (no parameters).
      act: the activation.
      dtype: the dtype of the computation, or None.
    """

    block: Any
    stages: Sequence[int]
    width: int = 16
    classes: int = 10
    image_net: bool = False
    shortcut: str = "conv"
    act: Activation = nn.relu
    dtype: Any = None

    @nn.compact
    def __call__(self, x: jax.Array, train: bool = True) -> jax.Array:
        stem = (7, 2) if self.image_net else (3, 1)
        x = conv(self.width, *stem, dtype=self.dtype, name="conv1")(x)
        x = self.act(norm(train, dtype=self.dtype, name="bn1")(x))
        if self.image_net:
            border: Any = ((1, 1), (1, 1))  # its hint says str
            x = nn.max_pool(x, (3, 3), (2, 2), border)
        for stage, blocks in enumerate(self.stages):
            for i in range(blocks):
                stride = 2 if stage and not i else 1
                name = f"layer{stage + 1}_{i}"
                kinds = (self.width * 2**stage, stride, self.shortcut, self.act, self.dtype)
                x = self.block(*kinds, name=name)(x, train)
        return nn.Dense(self.classes, dtype=self.dtype, name="fc")(x.mean((1, 2)))


resnet8 = functools.partial(ResNet, BasicBlock, (1, 1, 1))
resnet20 = functools.partial(ResNet, BasicBlock, (3, 3, 3))
resnet18 = functools.partial(ResNet, BasicBlock, (2, 2, 2, 2), image_net=True)
resnet50 = functools.partial(ResNet, Bottleneck, (3, 4, 6, 3), image_net=True)


class InvertedResidual(nn.Module):
    """Expand, depthwise, project; added to its input where the shapes allow it."""

    outputs: int
    stride: int
    expand: int
    dtype: Any = None

    @nn.compact
    def __call__(self, x: jax.Array, train: bool = True) -> jax.Array:
        kinds: dict[str, Any] = {"dtype": self.dtype}
        inner = x.shape[-1] * self.expand
        y = conv(inner, 1, name="conv1", **kinds)(x)
        y = nn.relu6(norm(train, name="bn1", **kinds)(y))
        y = conv(inner, 3, self.stride, feature_group_count=inner, name="conv2", **kinds)(y)
        y = nn.relu6(norm(train, name="bn2", **kinds)(y))
        y = conv(self.outputs, 1, name="conv3", **kinds)(y)
        y = norm(train, name="bn3", **kinds)(y)
        return x + y if x.shape == y.shape else y


class MobileNetV2(nn.Module):
    """M. Sandler et al., "MobileNetV2: Inverted Residuals and Linear Bottlenecks", 2018; shorter.

    Attributes:
      blocks: pairs of output channels (in multiples of ``width``) and stride.
      width: channels of the stem.
      expand: factor of the inner channels.
      classes: outputs.
      dtype: the dtype of the computation, or None.
    """

    blocks: Sequence[tuple[int, int]] = ((1, 1), (2, 2), (2, 1), (4, 2), (4, 1))
    width: int = 8
    expand: int = 4
    classes: int = 10
    dtype: Any = None

    @nn.compact
    def __call__(self, x: jax.Array, train: bool = True) -> jax.Array:
        kinds: dict[str, Any] = {"dtype": self.dtype}
        x = conv(self.width, 3, name="conv1", **kinds)(x)
        x = nn.relu6(norm(train, name="bn1", **kinds)(x))
        for i, (factor, stride) in enumerate(self.blocks):
            block = InvertedResidual(factor * self.width, stride, self.expand, self.dtype)
            x = block.copy(name=f"blocks_{i}")(x, train)
        x = conv(4 * x.shape[-1], 1, name="conv2", **kinds)(x)
        x = nn.relu6(norm(train, name="bn2", **kinds)(x))
        return nn.Dense(self.classes, name="classifier", **kinds)(x.mean((1, 2)))


class DenseLayer(nn.Module):
    """Norm, ReLU, 1x1, norm, ReLU, 3x3; the result is appended to the input's channels."""

    growth: int
    dtype: Any = None

    @nn.compact
    def __call__(self, x: jax.Array, train: bool = True) -> jax.Array:
        kinds: dict[str, Any] = {"dtype": self.dtype}
        y = nn.relu(norm(train, name="norm1", **kinds)(x))
        y = conv(4 * self.growth, 1, name="conv1", **kinds)(y)
        y = nn.relu(norm(train, name="norm2", **kinds)(y))
        y = conv(self.growth, 3, name="conv2", **kinds)(y)
        return jnp.concatenate([x, y], -1)


class DenseNet(nn.Module):
    """G. Huang et al., "Densely Connected Convolutional Networks", 2017; two blocks, a transition.

    Attributes:
      layers: dense layers of each block.
      growth: channels that a layer adds.
      classes: outputs.
      dtype: the dtype of the computation, or None.
    """

    layers: tuple[int, int] = (2, 2)
    growth: int = 4
    classes: int = 10
    dtype: Any = None

    @nn.compact
    def __call__(self, x: jax.Array, train: bool = True) -> jax.Array:
        kinds: dict[str, Any] = {"dtype": self.dtype}
        x = conv(2 * self.growth, 3, name="conv0", **kinds)(x)
        x = nn.relu(norm(train, name="norm0", **kinds)(x))
        for i in range(self.layers[0]):
            x = DenseLayer(self.growth, self.dtype, name=f"block1_{i}")(x, train)
        half = 2 * self.growth + self.growth * self.layers[0] // 2
        x = nn.relu(norm(train, name="norm_transition", **kinds)(x))
        x = conv(half, 1, name="conv_transition", **kinds)(x)
        x = nn.avg_pool(x, (2, 2), (2, 2))
        for i in range(self.layers[1]):
            x = DenseLayer(self.growth, self.dtype, name=f"block2_{i}")(x, train)
        x = nn.relu(norm(train, name="norm5", **kinds)(x)).mean((1, 2))
        return nn.Dense(self.classes, name="classifier", **kinds)(x)


class ViTBlock(nn.Module):
    """Pre-norm attention and MLP, each added to its input."""

    heads: int
    dtype: Any = None

    @nn.compact
    def __call__(self, x: jax.Array, train: bool = True) -> jax.Array:
        del train  # it has neither dropout nor running statistics
        kinds: dict[str, Any] = {"dtype": self.dtype}
        width = x.shape[-1]
        y = nn.LayerNorm(name="norm1", **kinds)(x)
        x = x + nn.MultiHeadDotProductAttention(self.heads, name="attn", **kinds)(y)
        y = nn.Dense(2 * width, name="fc1", **kinds)(nn.LayerNorm(name="norm2", **kinds)(x))
        return x + nn.Dense(width, name="fc2", **kinds)(nn.gelu(y))


class ViT(nn.Module):
    """A. Dosovitskiy et al., "An Image is Worth 16x16 Words", 2021; pooled by the mean.

    Attributes:
      depth: blocks.
      width: channels.
      heads: attention heads.
      patch: side of a patch in pixels.
      classes: outputs.
      dtype: the dtype of the computation, or None.
    """

    depth: int = 2
    width: int = 16
    heads: int = 2
    patch: int = 4
    classes: int = 10
    dtype: Any = None

    @nn.compact
    def __call__(self, x: jax.Array, train: bool = True) -> jax.Array:
        kinds: dict[str, Any] = {"dtype": self.dtype}
        window = (self.patch, self.patch)
        x = nn.Conv(self.width, window, window, "VALID", name="patch_embed", **kinds)(x)
        x = x.reshape(x.shape[0], -1, x.shape[-1])
        places = self.param("pos_embed", nn.initializers.normal(0.02), (1, *x.shape[1:]))
        x = x + jnp.broadcast_to(places, x.shape)
        for i in range(self.depth):
            x = ViTBlock(self.heads, self.dtype, name=f"blocks_{i}")(x, train)
        x = nn.LayerNorm(name="norm", **kinds)(x).mean(1)
        return nn.Dense(self.classes, name="head", **kinds)(x)
