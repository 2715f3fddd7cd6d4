"""Never loaded: its configuration is refused."""


class TritonPythonModel:
    def execute(self, requests):
        return []
