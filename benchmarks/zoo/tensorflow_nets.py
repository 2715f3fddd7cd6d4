"""The two networks in operations of TensorFlow, with the weights of PyTorch's modules."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from zoo.contestant import ROWS
from zoo.nets.encoder import HEADS, TOKENS, WIDTH


def function(tf: Any, model: str, weights: Mapping[str, Any]) -> Any:
    """Return the function of a batch X that computes ``OUT``."""
    body = {"cnn": _cnn, "encoder": _encoder}[model]
    constants = {name: tf.constant(weight.numpy()) for name, weight in weights.items()}

    def call(X: Any) -> Any:
        return {"OUT": body(tf, X, constants)}

    return tf.function(call, input_signature=[tf.TensorSpec([None, *ROWS[model]], tf.float32, name="X")])


def _cnn(tf: Any, x: Any, weights: Mapping[str, Any]) -> Any:
    def conv(x: Any, name: str, stride: int = 1) -> Any:
        kernel = tf.transpose(weights[f"{name}.weight"], [2, 3, 1, 0])
        border = [1, 1] if kernel.shape[0] == 3 else [0, 0]
        x = tf.nn.conv2d(x, kernel, stride, [[0, 0], border, border, [0, 0]])
        return x + weights[f"{name}.bias"]

    x = tf.nn.relu(conv(tf.transpose(x, [0, 2, 3, 1]), "stem"))
    for number in range(3):
        block, stride = f"blocks.{number}", 2 if number else 1
        around = conv(x, f"{block}.around", stride) if number else x
        x = conv(tf.nn.relu(conv(x, f"{block}.first", stride)), f"{block}.second")
        x = tf.nn.relu(x + around)
    return _linear(tf, tf.reduce_mean(x, [1, 2]), weights, "last")


def _encoder(tf: Any, x: Any, weights: Mapping[str, Any]) -> Any:
    def heads(name: str) -> Any:
        parts = tf.reshape(_linear(tf, x, weights, name), [-1, TOKENS, HEADS, WIDTH // HEADS])
        return tf.transpose(parts, [0, 2, 1, 3])

    def normed(x: Any, name: str) -> Any:
        mean, variance = tf.nn.moments(x, [2], keepdims=True)
        return (x - mean) * tf.math.rsqrt(variance + 1e-5) * weights[f"{name}.weight"] + weights[f"{name}.bias"]

    scores = tf.nn.softmax(tf.matmul(heads("query"), heads("key"), transpose_b=True) / (WIDTH // HEADS) ** 0.5)
    mixed = tf.reshape(tf.transpose(tf.matmul(scores, heads("value")), [0, 2, 1, 3]), [-1, TOKENS, WIDTH])
    x = normed(x + _linear(tf, mixed, weights, "out"), "before")
    x = normed(x + _linear(tf, tf.nn.gelu(_linear(tf, x, weights, "wide")), weights, "narrow"), "after")
    return tf.reduce_mean(x, 2)


def _linear(tf: Any, x: Any, weights: Mapping[str, Any], name: str) -> Any:
    kernel = tf.transpose(weights[f"{name}.weight"])
    if len(x.shape) == 3:  # one multiplication of two matrices, not one for each row
        tokens, width = x.shape[1], kernel.shape[1]
        flat = tf.matmul(tf.reshape(x, [-1, x.shape[2]]), kernel)
        return tf.reshape(flat, [-1, tokens, width]) + weights[f"{name}.bias"]
    return tf.matmul(x, kernel) + weights[f"{name}.bias"]
