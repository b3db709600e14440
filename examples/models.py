"""The models of the examples, with random weights from torch's current seed and no download.

Every model returns an object with ``logits``; that of a language model has a ``loss``, too, if it
was given ``labels``.
"""

from __future__ import annotations

from torch import Tensor, nn
from transformers import (
    BertConfig,
    BertForMaskedLM,
    GPT2Config,
    GPT2LMHeadModel,
    ResNetConfig,
    ResNetForImageClassification,
    SwinConfig,
    SwinForImageClassification,
)
from transformers.modeling_outputs import ImageClassifierOutputWithNoAttention

# Width, layers and heads by size; BERT's base and large and GPT-2's small are the published ones.
BERT = {"tiny": (256, 4, 4), "base": (768, 12, 12), "large": (1024, 24, 16)}
GPT2 = {"tiny": (256, 4, 4), "mini": (384, 8, 6), "small": (768, 12, 12)}


def resnet50(num_labels: int = 1000) -> nn.Module:
    """ResNet-50: 161 gradients; 25.6 M parameters at 1000 labels. Images of any size from 32 px.

    Reference: He et al., Deep Residual Learning for Image Recognition, https://arxiv.org/abs/1512.03385
    """
    config = ResNetConfig(
        depths=[3, 4, 6, 3],
        hidden_sizes=[256, 512, 1024, 2048],
        layer_type="bottleneck",
    )
    config.num_labels = num_labels
    return ResNetForImageClassification(config)


def resnet_small(num_labels: int = 10) -> nn.Module:
    """A ResNet of four basic blocks, 1.2 M parameters, that learns in seconds on one CPU core."""
    config = ResNetConfig(
        embedding_size=32,
        depths=[1, 1, 1, 1],
        hidden_sizes=[32, 64, 128, 256],
        layer_type="basic",
    )
    config.num_labels = num_labels
    return ResNetForImageClassification(config)


def vgg16(num_labels: int = 10) -> nn.Module:
    """VGG-16 with a CIFAR-style head: 30.4 M parameters at 10 labels. Images of 32 px or more.

    13 convolutions (14.7 M), pooled to one pixel, and a head of 512 -> 3712 -> 3712 -> labels.

    Reference: Simonyan and Zisserman, Very Deep Convolutional Networks, https://arxiv.org/abs/1409.1556
    """
    return _VGG16(num_labels)


def bert(size: str = "tiny", vocab_size: int = 8192) -> nn.Module:
    """BERT for masked language modelling; size tiny, base or large.

    They have 11 M, 110 M and 335 M parameters with the published vocabulary of 30522 words, and
    5.5 M, 92 M and 312 M with 8192 words.

    Reference: Devlin et al., BERT, https://arxiv.org/abs/1810.04805
    """
    width, layers, heads = BERT[size]
    config = BertConfig(
        vocab_size=vocab_size,
        hidden_size=width,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        intermediate_size=4 * width,
        pad_token_id=None,  # a padding word would never be trained
    )
    return BertForMaskedLM(config)


def gpt2(size: str = "tiny", vocab_size: int = 8192) -> nn.Module:
    """GPT-2 for causal language modelling; size tiny, mini or small.

    They have 16 M, 34 M and 124 M parameters with the published vocabulary of 50257 words, and
    5.5 M, 18 M and 92 M with 8192 words.

    Reference: Radford et al., Language Models are Unsupervised Multitask Learners, 2019
    """
    width, layers, heads = GPT2[size]
    config = GPT2Config(
        vocab_size=vocab_size,
        n_embd=width,
        n_layer=layers,
        n_head=heads,
        bos_token_id=None,
        eos_token_id=None,
    )
    model = GPT2LMHeadModel(config)
    model.loss_type = "ForCausalLM"  # the default of transformers, which warns if it is not set
    return model


def swin_t(num_labels: int = 1000) -> nn.Module:
    """Swin-T: 221 gradients; 28.3 M parameters at 1000 labels. Images of 224 px.

    Reference: Liu et al., Swin Transformer, https://arxiv.org/abs/2103.14030
    """
    config = SwinConfig()  # the published widths, depths and windows
    config.num_labels = num_labels
    return SwinForImageClassification(config)


class _VGG16(nn.Module):
    """13 convolutions in five stages, each stage halving the image, then three linear layers."""

    stages = ((64, 64), (128, 128), (256, 256, 256), (512, 512, 512), (512, 512, 512))
    head_width = 3712  # 14.7 M in the convolutions + 15.7 M here

    def __init__(self, num_labels: int) -> None:
        super().__init__()
        features: list[nn.Module] = []
        previous = 3
        for stage in self.stages:
            for width in stage:
                features += [nn.Conv2d(previous, width, 3, padding=1), nn.ReLU(inplace=True)]
                previous = width
            features.append(nn.MaxPool2d(2))
        self.features = nn.Sequential(*features, nn.AdaptiveAvgPool2d(1), nn.Flatten())
        self.classifier = nn.Sequential(
            nn.Linear(previous, self.head_width),
            nn.ReLU(inplace=True),
            nn.Linear(self.head_width, self.head_width),
            nn.ReLU(inplace=True),
            nn.Linear(self.head_width, num_labels),
        )
        for layer in self.modules():
            if isinstance(layer, nn.Conv2d | nn.Linear):
                # torch's default initialisation lets the signal vanish in 16 unnormalised layers
                nn.init.kaiming_normal_(layer.weight, nonlinearity="relu")
                if layer.bias is not None:
                    nn.init.zeros_(layer.bias)

    def forward(self, pixel_values: Tensor) -> ImageClassifierOutputWithNoAttention:
        logits = self.classifier(self.features(pixel_values))
        return ImageClassifierOutputWithNoAttention(logits=logits)
