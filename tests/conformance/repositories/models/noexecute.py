"""Has no execute."""


class TritonPythonModel:
    pass
