"""A backend: a model is a table, ``1/table.csv``. The first column is asked for, the others are the answer."""

import csv

import numpy as np

from nerite.core.errors import InvalidArgument, NotFound
from nerite.core.response import InferenceResponse, ResponseHeader
from nerite.core.tensor import from_array, to_array


class LookupBackend:
    name = "lookup"
    interface = 1
    isolated = False  # in threads of the server: there is nothing here that can crash, or be waited for

    def complete(self, context):  # the header of the table tells the tensors
        table = Table(context)
        types = {
            name: "TYPE_STRING" if values.dtype == object else "TYPE_FP32" for name, values in table.values.items()
        }
        outputs = [{"name": name, "data_type": datatype, "dims": [1]} for name, datatype in types.items()]
        inputs = [{"name": table.key, "data_type": "TYPE_STRING", "dims": [1]}]
        largest = context.config["max_batch_size"] or 1024
        return {**context.config, "max_batch_size": largest, "input": inputs, "output": outputs}

    def open(self, context):
        return Table(context)


class Table:
    """An open model. It has no state, so it can be all of its instances as well."""

    def __init__(self, context):
        self.model, self.version = context.name, str(context.version)
        path = context.version_directory / "table.csv"
        try:
            (self.key, *names), *rows = csv.reader(path.read_text().splitlines())
            keys, *columns = zip(*rows, strict=True)
            self.values = {name: numbers_or_texts(column) for name, column in zip(names, columns, strict=True)}
        except (OSError, ValueError) as error:
            raise InvalidArgument(
                f"'{path}' is no table: {error}. Its lines need as many values as the first."
            ) from error
        self.rows = {key.encode(): number for number, key in enumerate(keys)}

    def instance(self, context):
        return self

    def execute(self, requests, marks):
        return [self.answer(request) for request in requests]

    def answer(self, request):
        keys = to_array(request.header.inputs[0], request.data[0])
        try:
            found = np.array([self.rows[key] for key in keys.flat], int).reshape(keys.shape)
        except KeyError as unknown:
            return InferenceResponse.failed(NotFound(f"the table of '{self.model}' has no row {unknown}"))
        names = [name for name in self.values if not request.header.wanted or name in request.header.wanted]
        outputs = [from_array(name, self.values[name][found]) for name in names]
        header = ResponseHeader(self.model, self.version, [spec for spec, _ in outputs])
        return InferenceResponse(header, [data for _, data in outputs])

    def is_ready(self):
        return True

    def close(self):
        pass


def numbers_or_texts(column):
    try:
        return np.array(column, np.float32)
    except ValueError:
        return np.array([text.encode() for text in column], object)
