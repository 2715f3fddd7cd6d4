"""Makes the weights of this pipeline: an embedding learnt from Nerite's documentation, and an index of its passages.

    python examples/pipelines/rag/make_index.py [FOLDER OF MARKDOWN FILES]

A few seconds, and the same result each time. The embedding is latent semantic analysis, which needs no more than
counting and a singular value decomposition, and is better than its age on a few hundred passages.
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import numpy as np
from sklearn.decomposition import TruncatedSVD
from sklearn.feature_extraction.text import ENGLISH_STOP_WORDS, TfidfVectorizer

from nerite.testing import load_model

HERE = Path(__file__).resolve().parent
MODELS = HERE / "models"
DOCUMENTS = HERE.parents[2] / "docs"
LEFT_OUT = ("architecture.md", "differences.md", "flags.md")
"""Pages that are for developers, or lists made by programs."""
DIMENSIONS = 128
SHORTEST = 40
"""Letters. What is shorter says too little."""
WORD = r"([a-z0-9]{1,6})[a-z0-9]*"
"""Six letters of each word, so that "loads" and "loaded" are one."""


def main() -> None:
    """Learn the embedding, embed all passages with the model that will embed the questions, and store both."""
    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else DOCUMENTS
    found = [passage for path in sorted(folder.glob("*.md")) if path.name not in LEFT_OUT for passage in passages(path)]
    sources, texts = zip(*found, strict=True)
    learn_embedding([f"{source} {text}" for source, text in found], MODELS / "embed" / "1")
    with load_model(MODELS / "embed") as embed:
        vectors = [embed.infer({"text": [[f"{source} {text}".encode()]]})["vector"] for source, text in found]
    np.save(MODELS / "lookup" / "1" / "vectors.npy", np.concatenate(vectors))
    (MODELS / "lookup" / "1" / "passages.json").write_text(json.dumps({"sources": sources, "texts": texts}))
    print(f"{len(texts)} passages of {len(set(sources))} sections in {folder.name}/*.md")


def passages(path: Path) -> list[tuple[str, str]]:
    """Return the text of a Markdown file in passages, each with its source: the file and the section."""
    # Code and tables are no sentences, and answers are made of sentences.
    prose = re.sub(r"^```[^`]*^```$|^\|.*$", "", path.read_text(), flags=re.MULTILINE)
    found = []
    for heading, section in re.findall(r"^#+ +(.*)$\n((?:(?!#).*\n?)*)", prose, flags=re.MULTILINE):
        plain = re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", section.replace("**", ""))
        paragraphs = [" ".join(block.split()) for block in re.split(r"\n\s*\n", plain)]
        found += [(f"{path.name}, {heading}", paragraph) for paragraph in paragraphs if len(paragraph) >= SHORTEST]
    return found


def learn_embedding(texts: list[str], folder: Path) -> None:
    """Write what the model ``embed`` needs: what a word is, and the vector of each."""
    empty = {stem for word in ENGLISH_STOP_WORDS for stem in re.findall(WORD, word)}
    weigh = TfidfVectorizer(token_pattern=WORD, stop_words=sorted(empty), sublinear_tf=True)
    reduce = TruncatedSVD(DIMENSIONS, random_state=0).fit(weigh.fit_transform(texts))
    (folder / "words.json").write_text(json.dumps({"pattern": WORD, "words": weigh.get_feature_names_out().tolist()}))
    np.save(folder / "vectors.npy", (weigh.idf_[:, None] * reduce.components_.T).astype(np.float32))


if __name__ == "__main__":
    main()
