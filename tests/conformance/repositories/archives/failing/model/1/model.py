"""Cannot be initialised."""


class TritonPythonModel:
    def initialize(self, args):
        raise ValueError("no weights")

    def execute(self, requests):
        return []
