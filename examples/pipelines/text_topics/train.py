"""Trains a text pipeline of scikit-learn, and saves it where the model looks for it.

pip install scikit-learn joblib
python examples/pipelines/text_topics/train.py
"""

from __future__ import annotations

from pathlib import Path

import joblib
from sklearn.feature_extraction.text import TfidfVectorizer
from sklearn.linear_model import LogisticRegression
from sklearn.pipeline import make_pipeline
from tickets import tickets

TARGET = Path(__file__).resolve().parent / "models" / "topics" / "1" / "pipeline.joblib"


def main() -> None:
    """Train, say how many texts that it has not seen are right, and save."""
    pipeline = make_pipeline(
        TfidfVectorizer(analyzer="char_wb", ngram_range=(2, 4), sublinear_tf=True), LogisticRegression(C=10)
    )
    pipeline.fit(*tickets(1500, seed=0))
    print(f"{pipeline.score(*tickets(500, seed=1)):.1%} of 500 texts that it had not seen are right")
    joblib.dump(pipeline, TARGET, compress=3)


if __name__ == "__main__":
    main()
