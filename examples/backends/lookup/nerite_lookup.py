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

    def complete(self, context):
        """The header of the table tells the tensors."""
        table = read(context)
        key, *columns = table.columns
        described = {
            "max_batch_size": context.config["max_batch_size"] or 1024,
            "input": [{"name": key, "data_type": "TYPE_STRING", "dims": [1]}],
            "output": [
                {"name": name, "data_type": "TYPE_FP32" if name in table.numbers else "TYPE_STRING", "dims": [1]}
                for name in columns
            ],
        }
        return {**context.config, **described}

    def open(self, context):
        return read(context)


class Table:
    """An open model. It has no state, so it can be all of its instances as well."""

    def __init__(self, model, version, columns, rows):
        self.model, self.version, self.columns = model, version, columns
        self.rows = {row[0].encode(): number for number, row in enumerate(rows)}
        self.values, self.numbers = {}, set()
        for name, texts in zip(columns[1:], list(zip(*rows, strict=True))[1:], strict=True):
            try:
                self.values[name] = np.array(texts, np.float32)
                self.numbers.add(name)
            except ValueError:
                self.values[name] = np.array([text.encode() for text in texts], object)

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
        header = ResponseHeader(self.model, str(self.version), [spec for spec, _ in outputs])
        return InferenceResponse(header, [data for _, data in outputs])

    def is_ready(self):
        return True

    def close(self):
        pass


def read(context):
    path = context.version_directory / "table.csv"
    try:
        columns, *rows = csv.reader(path.read_text().splitlines())
        return Table(context.name, context.version, columns, rows)
    except (OSError, ValueError) as error:
        raise InvalidArgument(f"'{path}' is no table: {error}. Its lines need as many values as the first.") from error
