"""The few messages of TensorFlow's that we read ourselves, each with no more fields than we look at.

They are in a pool of their own, so that TensorFlow can bring its own in the same process. What is a map there is a list
of entries here, which has the same bytes.
"""

from __future__ import annotations

from functools import cache
from typing import Any, Final

_PACKAGE: Final = "nerite.tensorflow"
_REPEATED: Final = "*"
_FIELDS: Final[dict[str, dict[str, tuple[int, str]]]] = {
    "SavedModel": {"meta_graphs": (2, "*MetaGraph")},
    "MetaGraph": {"info": (1, "MetaInfo"), "signatures": (5, "*SignatureEntry")},
    "MetaInfo": {"tags": (4, "*string"), "tensorflow_version": (5, "string")},
    "SignatureEntry": {"key": (1, "string"), "value": (2, "Signature")},
    "Signature": {"inputs": (1, "*TensorEntry"), "outputs": (2, "*TensorEntry")},
    "TensorEntry": {"key": (1, "string"), "value": (2, "TensorInfo")},
    "TensorInfo": {"name": (1, "string"), "dtype": (2, "int32"), "shape": (3, "Shape")},
    "Shape": {"dim": (2, "*Dim"), "unknown_rank": (3, "bool")},
    "Dim": {"size": (1, "int64")},
}
"""By message: its fields with number and type, ``*`` before the type of those that may come several times."""


@cache
def saved_model() -> Any:
    """Return the class of ``saved_model.pb``."""
    from google.protobuf.descriptor_pb2 import FieldDescriptorProto, FileDescriptorProto
    from google.protobuf.descriptor_pool import DescriptorPool
    from google.protobuf.message_factory import GetMessageClass

    file = FileDescriptorProto(name="saved_model.proto", package=_PACKAGE, syntax="proto3")
    for name, fields in _FIELDS.items():
        message = file.message_type.add(name=name)
        for field_name, (number, kind) in fields.items():
            field = message.field.add(name=field_name, number=number)
            field.label = getattr(FieldDescriptorProto, f"LABEL_{'REPEATED' if kind[0] == _REPEATED else 'OPTIONAL'}")
            kind = kind.lstrip(_REPEATED)
            if kind in _FIELDS:
                field.type, field.type_name = FieldDescriptorProto.TYPE_MESSAGE, f".{_PACKAGE}.{kind}"
            else:
                field.type = getattr(FieldDescriptorProto, f"TYPE_{kind.upper()}")
    pool = DescriptorPool()
    pool.AddSerializedFile(file.SerializeToString())
    return GetMessageClass(pool.FindMessageTypeByName(f"{_PACKAGE}.SavedModel"))
