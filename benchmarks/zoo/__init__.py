"""Three models as each framework has them: what the benchmarks of frameworks serve, and what their bare loops call.

``cnn``      ResNet-8 of MLPerf Tiny over pictures of 32 x 32, its normalisation folded in: 12.5 million multiplications
``encoder``  a block of BERT's size over 64 tokens: 7 million weights
``forest``   500 trees over 30 features, for two classes

Importing this imports no framework: a contestant brings in its own when it writes or opens a model.
"""

from __future__ import annotations

from zoo.contestant import Contestant
from zoo.neural import NEURAL
from zoo.trees import TREES

CONTESTANTS: dict[str, Contestant] = {each.name: each for each in (*NEURAL, *TREES)}
