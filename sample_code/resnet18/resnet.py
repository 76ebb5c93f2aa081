"""ResNet18, for images of any size.

He, Zhang, Ren, Sun: Deep Residual Learning for Image Recognition, 2015, table 1 (18-layer).
"""

from mindspore import nn


def conv(in_channels, out_channels, kernel_size, stride=1):
    return nn.Conv2d(
        in_channels,
        out_channels,
        kernel_size,
        stride,
        pad_mode="pad",
        padding=kernel_size // 2,
        weight_init="HeNormal",
    )


class BasicBlock(nn.Cell):
    """Two 3x3 convolutions and a shortcut around them."""

    def __init__(self, in_channels, out_channels, stride):
        super().__init__()
        self.conv1 = conv(in_channels, out_channels, 3, stride)
        self.bn1 = nn.BatchNorm2d(out_channels)
        self.conv2 = conv(out_channels, out_channels, 3)
        self.bn2 = nn.BatchNorm2d(out_channels)
        self.relu = nn.ReLU()
        self.shortcut = nn.SequentialCell()
        if stride > 1 or in_channels != out_channels:
            self.shortcut = nn.SequentialCell(conv(in_channels, out_channels, 1, stride), nn.BatchNorm2d(out_channels))

    def construct(self, x):
        out = self.relu(self.bn1(self.conv1(x)))
        out = self.bn2(self.conv2(out))
        return self.relu(out + self.shortcut(x))


class ResNet18(nn.Cell):
    """Inputs (rows, 3, height, width), outputs logits (rows, classes)."""

    def __init__(self, num_classes=10):
        super().__init__()
        self.conv1 = conv(3, 64, 7, 2)
        self.bn1 = nn.BatchNorm2d(64)
        self.relu = nn.ReLU()
        self.max_pool = nn.MaxPool2d(3, 2, pad_mode="same")
        blocks, in_channels = [], 64
        for out_channels, stride in ((64, 1), (128, 2), (256, 2), (512, 2)):
            blocks += [BasicBlock(in_channels, out_channels, stride), BasicBlock(out_channels, out_channels, 1)]
            in_channels = out_channels
        self.layers = nn.SequentialCell(blocks)
        self.head = nn.Dense(512, num_classes)

    def construct(self, x):
        x = self.max_pool(self.relu(self.bn1(self.conv1(x))))
        x = self.layers(x)
        return self.head(x.mean((2, 3)))
