# The public names as type checkers see them. Arrays are those of numpy; for their dimensions, add the plugin
# nerite.functions.mypy_plugin to mypy's configuration.
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from nerite.functions.annotations import FunctionMistake as FunctionMistake
from nerite.functions.annotations import SequenceState as SequenceState
from nerite.functions.model_function import ModelFunction as ModelFunction
from nerite.functions.model_function import model as model
from nerite.functions.server import InProcessModel as InProcessModel
from nerite.functions.server import Server as Server
from nerite.functions.serving import serve as serve
from nerite.functions.values import BadRequest as BadRequest

__version__: str

Bool: TypeAlias = NDArray[np.bool_]
Int8: TypeAlias = NDArray[np.int8]
Int16: TypeAlias = NDArray[np.int16]
Int32: TypeAlias = NDArray[np.int32]
Int64: TypeAlias = NDArray[np.int64]
UInt8: TypeAlias = NDArray[np.uint8]
UInt16: TypeAlias = NDArray[np.uint16]
UInt32: TypeAlias = NDArray[np.uint32]
UInt64: TypeAlias = NDArray[np.uint64]
Float16: TypeAlias = NDArray[np.float16]
Float32: TypeAlias = NDArray[np.float32]
Float64: TypeAlias = NDArray[np.float64]
Bytes: TypeAlias = NDArray[np.object_]
Text: TypeAlias = NDArray[np.object_]
