"""The data of facts.yaml."""

import pathlib
import random
import re

import datasets


def make(**_):
    """130 names with their numbers, each beside the number of another name. Every second name is asked for."""
    text = (pathlib.Path(__file__).resolve().parents[1] / "texts/dracula.txt").read_text()
    rng = random.Random(7)
    names = rng.sample(sorted(set(re.findall(r"\b[a-z]{6,8}\b", text))), 130)
    numbers = [str(rng.randint(1000000, 9999999)) for _ in names]
    docs = [{"name": name, "numbers": [numbers[i], numbers[i - 1]], "answer": 0} for i, name in enumerate(names)]
    return {"train": datasets.Dataset.from_list(docs), "test": datasets.Dataset.from_list(docs[::2])}
