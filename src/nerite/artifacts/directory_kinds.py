"""Recognisers for directories and archives: Hugging Face, Python models, Triton models, NeMo and foreign formats.

Hugging Face models that generate text are served by an engine for language models if one is installed. Others are
served by a Python program that is copied into the repository beside them, where users may change it.
"""

from __future__ import annotations

import ast
import importlib.util
import tarfile
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any, Final, NamedTuple

from nerite.artifacts.artifact import Artifact, Candidate, Unusable, cut_off
from nerite.config.loading import CONFIG_FILE, find_versions
from nerite.config.model_config import ModelConfig, ModelDynamicBatching, ModelInput, ModelOutput, ModelParameter
from nerite.core.bounded_files import read_json

_PROGRAMS: Final = Path(__file__).resolve().with_name("programs")
_WEIGHTS: Final = (
    "model.safetensors",
    "model.safetensors.index.json",
    "pytorch_model.bin",
    "pytorch_model.bin.index.json",
)
_TOKENIZERS: Final = (
    "tokenizer.json", "tokenizer.model", "vocab.txt", "vocab.json", "spiece.model", "sentencepiece.bpe.model",
)  # fmt: skip
_UNUSED: Final = (".h5", ".msgpack", ".ot", ".gguf", ".onnx", ".tflite", ".md", ".gitattributes")
"""Suffixes of files that the program does not read: weights for other frameworks, and documentation."""
_EXPORT: Final = "Export it to ONNX: optimum-cli export onnx --model {path} exported, and add exported/model.onnx"
_TRANSCRIBING: Final = ("WhisperForConditionalGeneration",)
_SPEAKING: Final = ("SpeechT5ForTextToSpeech",)
_SPEECH_EXPORT: Final = (
    "Export it with one: optimum-cli export openvino --task text-to-audio --model {path} --model-kwargs "
    "'{{\"vocoder\": \"microsoft/speecht5_hifigan\"}}' exported, and add the directory 'exported'"
)
_MAX_BATCH: Final = 8


_CONVERTED: Final = ("openvino_model.xml", "openvino_language_model.xml")
_TOKENIZER_GRAPH: Final = "openvino_tokenizer.xml"
_ENGINE: Final = "pip install 'nerite[llm]'"
_AGAIN: Final = "Download or copy it again."


def recognise_openvino_language_model(candidate: Candidate) -> Artifact | None:
    """Recognise a language model that was exported to OpenVINO, with its tokenizer."""
    path = candidate.path
    if not candidate.is_directory or not (path / _TOKENIZER_GRAPH).is_file():
        return None
    graph = next((path / name for name in _CONVERTED if (path / name).is_file()), None)
    if graph is None:
        return None
    _check_graph(path, graph.name)
    files = {name: path / name for name in _needed(path, openvino=True)}
    return Artifact(
        "language model for OpenVINO", path, candidate.name, ModelConfig(backend="llm"), files,
        remarks=(f"It runs on an engine that serves many requests at once: {_ENGINE}",),
    )  # fmt: skip


class _Pipeline(NamedTuple):
    """A pipeline of several networks: what it does, and the files that it consists of."""

    kind: str
    task: str
    graphs: tuple[str, ...]
    others: tuple[str, ...] = ()


_ENCODER, _DECODER = "openvino_encoder_model.xml", "openvino_decoder_model.xml"
_POSTNET: Final = "openvino_postnet.xml"
_SPEECH_TO_TEXT: Final = _Pipeline(
    "speech-to-text model for OpenVINO",
    "transcribe",
    (_ENCODER, _DECODER, _TOKENIZER_GRAPH, "openvino_detokenizer.xml"),
    ("config.json", "generation_config.json", "preprocessor_config.json"),
)
_TEXT_TO_SPEECH: Final = _Pipeline(
    "text-to-speech model for OpenVINO",
    "text_to_speech",
    (_ENCODER, _DECODER, _POSTNET, "openvino_vocoder.xml", _TOKENIZER_GRAPH),
    ("config.json",),
)
_PARTS: Final = "model_index.json"
"""The list of the parts of a diffusion pipeline, each of which has a directory."""
_NETWORK: Final = "openvino_model.xml"
_VOICES: Final = "voices"


def recognise_openvino_pipeline(candidate: Candidate) -> Artifact | None:
    """Recognise a pipeline that was exported to OpenVINO: speech to text, text to speech, or text to image."""
    path = candidate.path
    if not candidate.is_directory:
        return None
    if (path / _PARTS).is_file():
        return _diffusion_pipeline(candidate)
    if not (path / _ENCODER).is_file():
        return None
    pipeline = _TEXT_TO_SPEECH if (path / _POSTNET).is_file() else _SPEECH_TO_TEXT
    for graph in pipeline.graphs:
        _check_graph(path, graph)
    for name in pipeline.others:
        if not (path / name).is_file():
            raise Unusable(path, f"the file {name} is missing", _AGAIN)
    files = {name: path / name for name in _needed(path, openvino=True)}
    if (path / _VOICES).is_dir():
        files[_VOICES] = path / _VOICES
    return _pipeline(candidate, pipeline.kind, pipeline.task, files)


def _diffusion_pipeline(candidate: Candidate) -> Artifact:
    path = candidate.path
    parts = sorted(graph.parent for graph in path.glob(f"*/{_NETWORK}"))
    if not parts:
        raise Unusable(
            path,
            "this is a diffusion pipeline for PyTorch, which has to be exported",
            f"optimum-cli export openvino --model {path} exported, and add the directory 'exported'",
        )
    for part in parts:
        _check_graph(part, _NETWORK)
    if not (path / "vae_decoder" / _NETWORK).is_file():
        raise Unusable(path, f"the network vae_decoder/{_NETWORK} is missing", _AGAIN)
    files = {
        child.name: child
        for child in sorted(path.iterdir())
        if not child.name.startswith(".") and (child.is_dir() or child.suffix == ".json")
    }
    return _pipeline(candidate, "image generation pipeline for OpenVINO", "text_to_image", files)


def _pipeline(candidate: Candidate, kind: str, task: str, files: Mapping[str, Path]) -> Artifact:
    remarks = (f"It runs on an engine: {_ENGINE}",)
    return Artifact(kind, candidate.path, candidate.name, ModelConfig(backend="llm"), files, remarks=remarks, task=task)


def _check_graph(path: Path, name: str) -> None:
    """Raise ``Unusable`` if a network or its weights are missing. Graphs of tokenizers may have no weights."""
    if not (path / name).is_file():
        raise Unusable(path, f"the network {name} is missing", _AGAIN)
    weights = (path / name).with_suffix(".bin")
    if not weights.is_file() and "tokenizer" not in name:
        raise Unusable(path, f"the weights are missing: {weights.name}", _AGAIN)


def recognise_hugging_face(candidate: Candidate) -> Artifact | None:
    """Recognise a directory saved by transformers. Rejects incomplete directories and unsupported tasks."""
    path = candidate.path
    if not candidate.is_directory:
        return None
    if (path / "adapter_config.json").is_file() and not (path / "config.json").is_file():
        remedy = "Merge it into its model: model.merge_and_unload().save_pretrained('merged'), and add that directory."
        raise Unusable(path, "this is an adapter, not a model", remedy)
    described = _json(path / "config.json")
    if "model_type" not in described:
        return None
    _check_weights(path)
    if "auto_map" in described and not candidate.trusted:
        remedy = "If you trust its origin, pass --trust."
        raise Unusable(path, "the model contains its own code, which runs when the model is loaded", remedy)
    architecture = next(iter(described.get("architectures") or ()), "")
    transcribes = architecture in _TRANSCRIBING
    if architecture in _SPEAKING:
        raise Unusable(path, "a checkpoint for speech synthesis has no vocoder", _SPEECH_EXPORT.format(path=path))
    if transcribes and not _has_engine():
        raise Unusable(path, "models that transcribe run on an engine, which is not installed", _ENGINE)
    if transcribes and not any((path / name).is_file() for name in _WEIGHTS[:2]):
        remedy = f"Save them so: AutoModelForSpeechSeq2Seq.from_pretrained('{path}').save_pretrained('{path}')"
        raise Unusable(path, "the engine reads weights from safetensors files alone", remedy)
    program, config = ("", ModelConfig()) if transcribes else _task(path, architecture, described)
    if not any((path / name).is_file() for name in _TOKENIZERS):
        remedy = f"Save it into the directory: AutoTokenizer.from_pretrained(...).save_pretrained('{path}')"
        raise Unusable(path, "the tokenizer is missing", remedy)
    if runs_on_an_engine(path, architecture, described):
        return Artifact(
            f"Hugging Face model ({architecture})",
            path,
            candidate.name,
            ModelConfig(backend="llm"),
            {name: path / name for name in _needed(path)},
            remarks=(
                "It runs on an engine that serves many requests at once, and may have to convert the model first."
                if not transcribes
                else "It runs on an engine, which may have to convert the model first.",
            ),
            task="transcribe" if transcribes else "",
        )
    if candidate.trusted and "auto_map" in described:
        trust = {"TRUST_REMOTE_CODE": ModelParameter(string_value="true")}
        config = ModelConfig(**{**_fields(config), "parameters": trust})
    files = {"model.py": _PROGRAMS / program, "pretrained.py": _PROGRAMS / "pretrained.py"}
    files |= {f"weights/{name}": path / name for name in _needed(path)}
    labels = [str(label) for _, label in sorted(described.get("id2label", {}).items(), key=lambda item: int(item[0]))]
    remarks = ["It runs in model.py, which requires the packages torch and transformers. You may edit it."]
    if program == "generate_text.py":
        remarks.append(
            "It processes one request at a time. An engine for language models serves many at once: "
            "pip install 'nerite[llm]', then add the model again."
        )
    return Artifact(
        f"Hugging Face model ({architecture})",
        path,
        candidate.name,
        config,
        files,
        make=partial(_write_labels, labels) if program == "classify_text.py" and labels else None,
        remarks=tuple(remarks),
    )


def _task(path: Path, architecture: str, described: Mapping[str, Any]) -> tuple[str, ModelConfig]:
    """Return the program for a model, and its configuration. Raises ``Unusable`` if the task is not supported."""
    if architecture.endswith("ForSequenceClassification"):
        labels = len(described.get("id2label", ())) or 2
        output = ModelOutput(
            name="scores", data_type="TYPE_FP32", dims=(labels,),
            label_filename="labels.txt" if described.get("id2label") else "",
        )  # fmt: skip
        return "classify_text.py", _config(output, _MAX_BATCH)
    if architecture.endswith(("ForCausalLM", "ForConditionalGeneration", "LMHeadModel")) and not _sees(described):
        output = ModelOutput(name="generated", data_type="TYPE_STRING", dims=(1,))
        return "generate_text.py", _config(output, 0)
    if architecture.endswith("Model") and "hidden_size" in described and not _sees(described):
        output = ModelOutput(name="embedding", data_type="TYPE_FP32", dims=(int(described["hidden_size"]),))
        return "embed_text.py", _config(output, _MAX_BATCH)
    what = f"the architecture {architecture} is not supported" if architecture else "config.json names no architecture"
    raise Unusable(path, what, _EXPORT.format(path=path))


def runs_on_an_engine(path: Path, architecture: str, described: Mapping[str, Any]) -> bool:
    """Return whether an installed engine can generate text with the model, embed texts, or rerank them."""
    generates = architecture.endswith(("ForCausalLM", "LMHeadModel"))
    if architecture in _TRANSCRIBING:
        return _has_engine()
    reranks = architecture.endswith("ForSequenceClassification") and len(described.get("id2label", ())) == 1
    return (
        (generates or reranks or (path / "modules.json").is_file())
        and "auto_map" not in described
        and any((path / name).is_file() for name in _WEIGHTS[:2])
        and _has_engine()
    )


def _has_engine() -> bool:
    return importlib.util.find_spec("openvino_genai") is not None


def _config(output: ModelOutput, max_batch_size: int) -> ModelConfig:
    return ModelConfig(
        backend="python",
        max_batch_size=max_batch_size,
        input=(ModelInput(name="text", data_type="TYPE_STRING", dims=(1,)),),
        output=(output,),
        dynamic_batching=ModelDynamicBatching() if max_batch_size else None,
    )


def _fields(config: ModelConfig) -> dict[str, Any]:
    return {name: getattr(config, name) for name in config.__slots__}


def _sees(described: Mapping[str, Any]) -> bool:
    return any(key in described for key in ("vision_config", "image_size", "num_mel_bins", "conv_dim"))


def _check_weights(path: Path) -> None:
    """Raise ``Unusable`` if weights are missing or truncated."""
    found = next((path / name for name in _WEIGHTS if (path / name).is_file()), None)
    if found is None:
        other = sorted(child.name for child in path.glob("*") if child.suffix in (".h5", ".msgpack", ".gguf"))
        what = f" ({other[0]} is for another framework)" if other else ""
        remedy = "Save them: model.save_pretrained('directory'); or, if Git LFS stores them, fetch them: git lfs pull"
        raise Unusable(path, f"the weights are missing{what}", remedy)
    if found.suffix == ".json":
        for shard in sorted(set(_json(found).get("weight_map", {}).values())):
            if not (path / shard).is_file():
                raise Unusable(path, f"a shard of the weights is missing: {shard}", "Download or copy it again.")
            Candidate(path / shard).check()
    else:
        whole = Candidate(found)
        whole.check()
        if found.suffix == ".safetensors":
            length = int.from_bytes(whole.head[:8], "little")
            if whole.size < 8 + length:
                raise cut_off(found, "its header is longer than the file")


def _needed(path: Path, *, openvino: bool = False) -> Iterator[str]:
    """Yield the names of the files that the program reads, and of 1_Pooling, the directory with the pooling mode.

    ``openvino``: the weights are OpenVINO's.
    """
    safe = not openvino and any((path / name).is_file() for name in _WEIGHTS[:2])
    for child in sorted(path.iterdir()):
        if child.is_dir():
            if child.name == "1_Pooling":
                yield child.name
        elif openvino and (child.suffix == ".safetensors" or _is_other_weights(child)):
            continue
        elif not (child.name.startswith(".") or child.suffix in _UNUSED or (safe and child.suffix == ".bin")):
            yield child.name


def _is_other_weights(child: Path) -> bool:
    """Return whether a file has weights that belong to no graph of OpenVINO."""
    return child.suffix == ".bin" and not child.with_suffix(".xml").is_file()


def _write_labels(labels: list[str], directory: Path) -> None:
    (directory.parent / "labels.txt").write_text("".join(f"{label}\n" for label in labels))


def _json(path: Path) -> dict[str, Any]:
    try:
        document = read_json(path)
    except (OSError, ValueError):
        return {}
    return document if isinstance(document, dict) else {}


# A Python model: a ``model.py`` with Triton's class, or a directory that contains one and its other files.

_CLASS = "TritonPythonModel"


def recognise_python_model(candidate: Candidate) -> Artifact | None:
    """Recognise a Python model."""
    path = candidate.path
    if candidate.is_directory:
        code = path / "model.py"
        if not code.is_file():
            return None
        files = {child.name: child for child in sorted(path.iterdir()) if _belongs(child.name)}
    elif candidate.suffix == ".py":
        code = path
        files = {"model.py": path}
    else:
        return None
    _check(code)
    return candidate.artifact("Python model", ModelConfig(backend="python"), files)


def _check(code: Path) -> None:
    """Raise ``Unusable`` if the code cannot be a model, as far as that is visible without running it."""
    try:
        tree = ast.parse(code.read_bytes(), str(code))
    except (SyntaxError, ValueError) as error:
        line = f", line {error.lineno}" if isinstance(error, SyntaxError) else ""
        raise Unusable(code, f"not valid Python{line}: {error}", "Fix it, and check that it can be imported.") from None
    nodes = list(ast.walk(tree))
    imported = {alias.name for node in nodes if isinstance(node, ast.ImportFrom) for alias in node.names}
    assigned = {node.id for node in nodes if isinstance(node, ast.Name)}
    found = [node for node in nodes if isinstance(node, ast.ClassDef) and node.name == _CLASS]
    if not found and not {_CLASS, "*"} & (imported | assigned):
        remedy = f"Write a class {_CLASS} with a method execute(self, requests): docs/python-models.md"
        raise Unusable(code, f"the file has no class {_CLASS}", remedy)
    if any(not each.bases and not _has_execute(each) for each in found):
        remedy = "Define execute(self, requests), which returns one response per request: docs/python-models.md"
        raise Unusable(code, f"the class {_CLASS} has no method execute", remedy)


def _has_execute(definition: ast.ClassDef) -> bool:
    methods = (ast.FunctionDef, ast.AsyncFunctionDef)
    named = {node.name for node in definition.body if isinstance(node, methods)}
    assigned = {node.id for node in ast.walk(definition) if isinstance(node, ast.Name)}
    return "execute" in named | assigned


def _belongs(name: str) -> bool:
    return name != "__pycache__" and not name.startswith(".")


def recognise_triton_model(candidate: Candidate) -> Artifact | None:
    """Recognise a model directory of a Triton repository, which has versions and may have a configuration."""
    path = candidate.path
    if not candidate.is_directory:
        return None
    directories = [child.name for child in path.iterdir() if child.is_dir()]
    numbers = find_versions(directories).numbers
    configured = (path / CONFIG_FILE).is_file()
    if not numbers:
        if configured:
            remedy = f"Put the model's files into {path / '1'}."
            raise Unusable(path, f"the directory has a {CONFIG_FILE} but no version", remedy)
        _refuse_a_repository(path)
        return None
    versions = {number: path / str(number) for number in numbers}
    beside = {
        child.name: child
        for child in sorted(path.iterdir())
        if not child.name.startswith(".") and child not in versions.values()
    }
    return Artifact("model directory", path, candidate.name, beside=beside, versions=versions, finished=configured)


def _refuse_a_repository(path: Path) -> None:
    models = sorted(child.parent.name for child in path.glob(f"*/{CONFIG_FILE}"))
    if models:
        remedy = f"Serve the repository: nerite serve {path}. Or add one of its models: nerite add {path / models[0]}"
        raise Unusable(path, f"this is a repository of {len(models)} models, not a model", remedy)


# NeMo archives: a training format that must be exported before it can be served.

_PACKED = b"\x1f\x8b"
_NEMO_EXPORT = (
    "Export it with NeMo: model = ModelPT.restore_from('{name}'); model.export('model.onnx'). "
    "Convert a language model to a Hugging Face directory or a TensorRT-LLM engine instead."
)


def recognise_nemo(candidate: Candidate) -> Artifact | None:
    """Reject a NeMo archive with instructions for exporting it."""
    if candidate.is_directory or not (candidate.suffix == ".nemo" or _is_tar(candidate)):
        return None
    try:
        with tarfile.open(candidate.path) as archive:
            members = archive.getmembers()
    except (tarfile.TarError, EOFError, OSError) as error:
        if candidate.suffix == ".nemo":
            raise cut_off(candidate.path, str(error)) from None
        return None
    names = [member.name.removeprefix("./") for member in members]
    end = max((member.offset_data + member.size for member in members), default=0)
    if end > candidate.size and not candidate.head.startswith(_PACKED):
        raise cut_off(candidate.path, f"{end - candidate.size:,} bytes are missing")
    if candidate.suffix != ".nemo" and "model_config.yaml" not in names:
        remedy = "Unpack it, and specify the file or directory in it that is the model."
        raise Unusable(candidate.path, "this is an archive", remedy)
    raise Unusable(
        candidate.path,
        "this is a NeMo archive, which contains weights and settings but no program",
        _NEMO_EXPORT.format(name=candidate.path.name),
    )


def _is_tar(candidate: Candidate) -> bool:
    return candidate.head[257:262] == b"ustar" or (
        candidate.head.startswith(_PACKED) and candidate.path.name.endswith((".tar.gz", ".tgz"))
    )


class _Format(NamedTuple):
    """A known format that cannot be served: its magic number, its name, and how to convert it."""

    magic: bytes
    what: str
    remedy: str


_KERAS: Final = "Export it: keras.models.load_model('{name}').export('directory'), and add the directory."
_FORMATS: Final = (
    _Format(b"\x89HDF\r\n\x1a\n", "an HDF5 file, the former format of Keras models", _KERAS),
    _Format(b"CBM1", "a CatBoost model", "Save it as ONNX: model.save_model('model.onnx', format='onnx')"),
    _Format(b"\x93NUMPY", "a numpy array, not a model", "Specify the file that training has saved."),
)


def recognise_foreign(candidate: Candidate) -> Artifact | None:
    """Reject known formats that cannot be served."""
    path = candidate.path
    if "model.weights.h5" in candidate.members:
        raise Unusable(path, "this is a Keras model", _KERAS.format(name=path.name))
    for known in _FORMATS:
        if candidate.head.startswith(known.magic):
            raise Unusable(path, f"this is {known.what}", known.remedy.format(name=path.name))
    return None
