"""Small models for TensorFlow and LiteRT, made by TensorFlow itself: in a process of its own, once, and then kept.

Run as a program it makes them in the folder that it is given.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

TYPES = (
    "float32", "float64", "float16", "bfloat16", "int8", "int16", "int32", "int64",
    "uint8", "uint16", "uint32", "uint64", "bool", "string",
)  # fmt: skip
VOCABULARY = ("zero", "one", "two", "thr\u00e9\u00e9")


def make(folder: Path) -> None:
    """Make the folder with the models."""
    environment = {**os.environ, "TF_CPP_MIN_LOG_LEVEL": "2"}
    command = [sys.executable, __file__, str(folder)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(done.stderr[-4000:])


def ingredients() -> str:
    """Return what the models depend on."""
    return Path(__file__).read_text() + _version()


def _version() -> str:
    try:
        return version("tensorflow-cpu")
    except PackageNotFoundError:
        return version("tensorflow")


def _saved_models(tf: Any, folder: Path) -> None:
    spec = tf.TensorSpec
    module: Any = tf.Module()
    module.weight = tf.Variable(2.0)

    def save(name: str, *, module: Any = module, **signatures: Any) -> None:
        tf.saved_model.save(module, str(folder / name), signatures=signatures)

    def function(body: Any, *specs: Any) -> Any:
        return tf.function(body, input_signature=specs)

    rows = spec([None, 4], tf.float32, name="x")
    scaled = function(
        lambda x: {"doubled": x * module.weight, "total": tf.reduce_sum(x, 1, keepdims=True)},
        rows,
    )
    save("scaled", serving_default=scaled)
    # Cut down to what can be read and not be loaded.
    shutil.copytree(folder / "scaled", folder / "weightless")
    shutil.rmtree(folder / "weightless" / "variables")
    save("shouted", serving_default=function(lambda t: {"loud": tf.strings.upper(t)}, spec([None, 1], tf.string, "t")))
    tripled = function(lambda x: {"tripled": x * 3.0}, rows)
    save("two", small=scaled, large=tripled)
    save("one", only=tripled)
    save("none", module=module)
    save("fixed", serving_default=function(lambda x: {"y": x + 1.0}, spec([1, 3], tf.float32, "x")))
    save("shapeless", serving_default=function(lambda x: {"y": x + 1.0}, spec(None, tf.float32, "x")))
    save("scalar", serving_default=function(lambda x: {"y": x + 1.0}, spec([], tf.float32, "x")))
    any_rows = spec([None, None], tf.float32, "x")
    save("picky", serving_default=function(lambda x: {"y": tf.reshape(x, [-1, 3])}, any_rows))
    complex_rows = spec([None, 4], tf.complex64, name="x")
    save("complex", serving_default=function(lambda x: {"y": tf.abs(x)}, complex_rows))
    typed = [spec([None, 2], getattr(tf, each), name=each) for each in TYPES]
    save(
        "typed",
        serving_default=function(
            lambda *given: {f"{each}_out": tf.identity(x) for each, x in zip(TYPES, given, strict=True)}, *typed
        ),
    )
    v1 = tf.compat.v1
    with tf.Graph().as_default(), v1.Session() as session:
        # An output that is an input, and two that are the same.
        x = v1.placeholder(tf.float32, [None, 2], "x")
        y = tf.multiply(x, v1.get_variable("w", initializer=3.0, use_resource=False), name="y")
        session.run(v1.global_variables_initializer())
        builder = v1.saved_model.Builder(str(folder / "old"))
        signature = v1.saved_model.predict_signature_def({"x": x}, {"same": x, "y": y, "again": y})
        builder.add_meta_graph_and_variables(session, ["special", "tagged"], {"serving_default": signature})
        builder.save()
    with tf.Graph().as_default(), v1.Session() as session:
        x = v1.sparse_placeholder(tf.float32, [None, 4], "x")
        builder = v1.saved_model.Builder(str(folder / "sparse"))
        signature = v1.saved_model.predict_signature_def({"x": x}, {"y": tf.sparse.to_dense(x)})
        builder.add_meta_graph_and_variables(session, ["serve"], {"serving_default": signature})
        builder.save()


def _frozen_graphs(tf: Any, folder: Path) -> None:
    v1 = tf.compat.v1
    with tf.Graph().as_default() as graph:
        a = v1.placeholder(tf.float32, [None, 4], "a")
        b = v1.placeholder(tf.float32, [None, 4], "b")
        tf.add(a, b, name="sum")
        tf.split(tf.subtract(a, b), 2, axis=1, name="halves")
        (folder / "frozen.pb").write_bytes(graph.as_graph_def().SerializeToString())
    with tf.Graph().as_default() as graph:
        x = v1.placeholder(tf.float32, [3], "x")
        y = v1.placeholder_with_default(tf.constant([1.0, 1.0, 1.0]), [3], "y")
        tf.add(x, y, name="sum")
        (folder / "defaulted.pb").write_bytes(graph.as_graph_def().SerializeToString())
    with tf.Graph().as_default() as graph:
        words = v1.placeholder(tf.string, [None, 1], "words")
        keys, values = tf.constant(VOCABULARY), tf.range(len(VOCABULARY), dtype=tf.int64)
        table = tf.lookup.StaticHashTable(tf.lookup.KeyValueTensorInitializer(keys, values), -1)
        tf.identity(table.lookup(words), name="number")
        tf.group(v1.get_collection(v1.GraphKeys.TABLE_INITIALIZERS), name="fill")
        (folder / "table.pb").write_bytes(graph.as_graph_def().SerializeToString())


def _lite_models(tf: Any, folder: Path) -> None:
    def convert(name: str, body: Any, *specs: Any, key: str = "serving_default", **settings: Any) -> None:
        module: Any = tf.Module()
        module.call = tf.function(body, input_signature=specs)
        tf.saved_model.save(module, str(folder / "converted"), signatures={key: module.call})
        write(name, [key], **settings)

    def write(name: str, keys: list[str], **settings: Any) -> None:
        converter = tf.lite.TFLiteConverter.from_saved_model(str(folder / "converted"), signature_keys=keys)
        for setting, value in settings.items():
            setattr(converter, setting, value)
        (folder / f"{name}.tflite").write_bytes(converter.convert())

    spec = tf.TensorSpec
    rows = spec([None, 4], tf.float32, name="x")
    convert("scaled", lambda x: {"doubled": x * 2.0, "total": tf.reduce_sum(x, 1, keepdims=True)}, rows)
    convert("pair", lambda a, b: {"both": a + 2.0 * b}, *(spec([None, 3], tf.float32, name=each) for each in "ab"))
    convert("stubborn", lambda x: {"y": tf.reshape(x, [3, 1])}, spec([1, 3], tf.float32, name="x"))
    convert("fixed", lambda x: {"y": x + 1.0}, spec([1, 3], tf.float32, name="x"))
    convert("words", lambda n: {"word": tf.gather(tf.constant(VOCABULARY), n)}, spec([None, 1], tf.int32, name="n"))
    convert("upright", lambda t: {"out": tf.reshape(t, [-1, 2, 1])}, spec([None, 2], tf.string, name="t"))
    convert("flags", lambda x: {"high": x > 2}, spec([None, 2], tf.int64, name="x"))
    weights = tf.reshape(tf.range(16.0), [4, 4]) / 16.0
    convert(
        "quantised",
        lambda x: {"y": tf.matmul(x, weights)},
        spec([1, 4], tf.float32, name="x"),
        optimizations=[tf.lite.Optimize.DEFAULT],
        representative_dataset=lambda: ([tf.random.uniform([1, 4])] for _ in range(20)),
        inference_input_type=tf.int8,
        inference_output_type=tf.int8,
    )
    module: Any = tf.Module()
    module.doubled = tf.function(lambda x: {"y": x * 2.0}, input_signature=[rows])
    module.tripled = tf.function(lambda x: {"y": x * 3.0}, input_signature=[rows])
    signatures = {"double": module.doubled, "triple": module.tripled}
    tf.saved_model.save(module, str(folder / "converted"), signatures=signatures)
    write("two", [*signatures])
    convert(
        "flex",
        lambda x: {"y": tf.linalg.det(x)},
        spec([None, 2, 2], tf.float32, name="x"),
        target_spec=tf.lite.TargetSpec(supported_ops=[tf.lite.OpsSet.SELECT_TF_OPS]),
    )


def main(folder: Path) -> None:
    import tensorflow as tf

    folder.mkdir(parents=True)
    _saved_models(tf, folder)
    _frozen_graphs(tf, folder)
    _lite_models(tf, folder)
    shutil.rmtree(folder / "converted")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
