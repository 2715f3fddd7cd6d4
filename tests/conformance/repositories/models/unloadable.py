"""Cannot be loaded."""


class TritonPythonModel:
    def initialize(self, args):
        raise RuntimeError("told to")
