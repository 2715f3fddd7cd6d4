"""Models of a backend written in Python."""

from __future__ import annotations

from conformance.repositories import source

TELLER = 'backend: "teller"\n'
NOBODY = 'backend: "abacus"\n'
UNUSED = {"1/artifact.txt": "Not asked for: there is no backend for it.\n"}

MODELS = {
    "by_name.teller": {"1/word.txt": "named\n"},
    "library": {"config.pbtxt": TELLER + 'runtime: "libtriton_teller.so"\n', **UNUSED},
    "named": {
        "config.pbtxt": TELLER + 'default_model_filename: "word.txt"\ninstance_group { count: 2 kind: KIND_CPU }\n',
        "1/word.txt": "name\n",
    },
    "no_word": {"config.pbtxt": TELLER, **UNUSED},
    "nobody": {"config.pbtxt": NOBODY, **UNUSED},
    "nobody_in_python": {"config.pbtxt": NOBODY + 'runtime: "model.py"\n', **UNUSED},
    "own_code": {
        "config.pbtxt": TELLER + 'runtime: "model.py"\nparameters { key: "COLOUR" value: { string_value: "green" } }\n',
        "1/model.py": source("own_code"),
        "1/word.txt": "mine\n",
    },
    "short": {"config.pbtxt": TELLER, "1/word.txt": "hello\n"},
}
