"""The tests that every backend has to pass, on a table.

pip install pytest .
pytest
"""

import numpy as np
from nerite_lookup import LookupBackend

from nerite.testing import BackendContract

WEIGHTS = {b"H": 1.008, b"He": 4.0026}


class TestLookup(BackendContract):
    backend = LookupBackend()

    def write_model(self, directory):
        (directory / "1").mkdir(parents=True)
        (directory / "config.pbtxt").write_text('backend: "lookup"')
        (directory / "1" / "table.csv").write_text("symbol,weight,note\nH,1.008,gas\nHe,4.0026,gas\n")

    def requests(self):
        return [{"symbol": [["H"]]}, {"symbol": [["He"]]}, {"symbol": [["He"], ["H"]]}]

    def answer(self, inputs):
        symbols = inputs["symbol"]
        weights = [WEIGHTS[symbol] for symbol in symbols.flat]
        return {
            "weight": np.array(weights, np.float32).reshape(symbols.shape),
            "note": np.full(symbols.shape, b"gas", object),
        }

    def bad_request(self):
        return {"symbol": [["Xx"]]}

    def break_model(self, directory):
        (directory / "1" / "table.csv").write_text("symbol,weight\nH\n")
