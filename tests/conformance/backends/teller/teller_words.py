"""A helper beside the backend."""

import os


def read_word(directory):
    with open(os.path.join(directory, "word.txt")) as file:
        return file.read().strip()
