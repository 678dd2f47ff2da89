"""Sixty-four short English sentences with a sentiment, for examples with a sentence encoder.

Written for this package. They come in pairs on one topic, first positive, then negative, so that a
classifier has to read the sentiment; in cross-validation keep a pair together. None has more than
32 BERT word pieces, special tokens included.

Imports: the standard library.
"""

from importlib import resources


def load_sentences() -> tuple[list[str], list[int]]:
    """Load the sentences.

    Returns:
        The sentences and their labels, 1 for positive and 0 for negative, 32 of each.
    """
    table = resources.files("quotient_nets.demo").joinpath("sentences.tsv").read_text("utf-8")
    rows = [line.split("\t") for line in table.splitlines() if not line.startswith("#")]
    return [text for _, text in rows], [int(label) for label, _ in rows]
