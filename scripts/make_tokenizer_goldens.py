#!/usr/bin/env python3
"""Makes tests/golden/tokenizer: small tokenizers, and the ids that Hugging Face `tokenizers` gives
for the adversarial texts of texts.json and for a book. A new text is a line of texts.json; a new
feature of tokenizer.json is a line of variants.json, whose cases this fills in.

Needs: pip install tokenizers xxhash

    scripts/make_tokenizer_goldens.py                 ids of the stored tokenizers again
    scripts/make_tokenizer_goldens.py --train FILE... train the stored byte-level tokenizers anew first
"""
import argparse
import json
import pathlib
import struct

import tokenizers
import xxhash
from tokenizers import models, pre_tokenizers, trainers

ROOT = pathlib.Path(__file__).resolve().parent.parent
GOLDEN = ROOT / "tests/golden/tokenizer"
NANO = ROOT / "examples/models/nano/tokenizer.json"
BOOK = ROOT / "examples/texts/dracula.txt"

LONGEST_STORED = 400  # ids; longer lists are stored as a hash


def text_of(entry):
    return entry if isinstance(entry, str) else entry["repeat"] * entry["count"]


def hash_ids(ids):
    return xxhash.xxh3_64(struct.pack(f"<{len(ids)}i", *ids)).hexdigest()


def golden(text, ids, decode):
    """One case: the ids, and what decoding gives where that is not the text."""
    case = {"ids": ids} if len(ids) <= LONGEST_STORED else {"count": len(ids), "xxh3": hash_ids(ids)}
    for key, keep in (("decoded", False), ("decoded_special", True)):
        decoded = decode(ids, keep)
        if decoded != text:
            raw = decoded.encode()
            case[key] = decoded if len(raw) <= 2000 else {"xxh3": xxhash.xxh3_64(raw).hexdigest()}
    return case


def hugging_face(tokenizer):
    return (lambda text: tokenizer.encode(text).ids,
            lambda ids, keep: tokenizer.decode(ids, skip_special_tokens=not keep))


def compact(value):
    return json.dumps(value, ensure_ascii=True, separators=(",", ":"))


def write_json(path, value):
    path.write_text(compact(value) + "\n")


def encoders():
    yield "nano", *hugging_face(tokenizers.Tokenizer.from_file(str(NANO)))
    for name in ("qwen2", "gpt2", "ignore_merges", "llama2", "llama2_metaspace"):
        yield name, *hugging_face(tokenizers.Tokenizer.from_file(str(GOLDEN / f"{name}.json")))


def train_byte_level(name, texts):
    """A stored tokenizer with the vocabulary and merges of these texts; all else of it stays."""
    path = GOLDEN / f"{name}.json"
    golden, stored = json.loads(path.read_text()), tokenizers.Tokenizer.from_file(str(path))
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.normalizer, tokenizer.pre_tokenizer = stored.normalizer, stored.pre_tokenizer
    trainer = trainers.BpeTrainer(vocab_size=len(golden["model"]["vocab"]), special_tokens=[], show_progress=False,
                                  initial_alphabet=pre_tokenizers.ByteLevel.alphabet())
    tokenizer.train_from_iterator(texts, trainer)
    model = json.loads(tokenizer.to_str())["model"]
    golden["model"].update(vocab=model["vocab"], merges=model["merges"])
    return golden


def train(texts):
    write_json(GOLDEN / "qwen2.json", train_byte_level("qwen2", texts))

    gpt2 = train_byte_level("gpt2", texts)  # with merges as in the file that GPT-2 came with
    gpt2["model"]["merges"] = [" ".join(merge) for merge in gpt2["model"]["merges"]]
    write_json(GOLDEN / "gpt2.json", gpt2)

    ignore = train_byte_level("ignore_merges", texts)
    # Tokens that no merge makes any more, so that only the whole-word look-up finds them.
    merges = ignore["model"]["merges"]
    made = {a + b for i, (a, b) in enumerate(merges) if i % 3}
    used = {part for a, b in merges for part in (a, b)}
    ignore["model"]["merges"] = [m for m in merges if m[0] + m[1] in made or m[0] + m[1] in used]
    write_json(GOLDEN / "ignore_merges.json", ignore)


def make_variants(texts):
    """The cases of variants.json: JSON patches of one tiny tokenizer, each showing one feature in its ids.

    The model knows a few letters and joins unknown characters of one word, so that ids show where
    words end."""
    golden = json.loads((GOLDEN / "variants.json").read_text())
    base = golden["base"]
    lines = []
    for variant in golden["variants"]:
        patch = variant["patch"]
        merged = base | patch | {"model": base["model"] | patch.get("model", {})}
        encode, decode = hugging_face(tokenizers.Tokenizer.from_str(json.dumps(merged)))
        cases = []
        for text in texts:
            ids = encode(text)
            # A lossy model: what decoding gives is stored as a hash of both forms.
            decoded = "\0".join(decode(ids, keep) for keep in (False, True)).encode()
            cases.append([len(ids), hash_ids(ids), xxhash.xxh3_64(decoded).hexdigest()])
        lines.append(f'{{"name":{compact(variant["name"])},"patch":{compact(patch)},\n "cases":{compact(cases)}}}')
    (GOLDEN / "variants.json").write_text(
        f'{{"base":{compact(base)},\n"variants":[\n' + ",\n".join(lines) + "]}\n")


def main():
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--train", nargs="+", type=pathlib.Path, metavar="FILE")
    arguments = parser.parse_args()
    GOLDEN.mkdir(parents=True, exist_ok=True)
    if arguments.train:
        texts = [file.read_bytes().decode() for file in arguments.train]
        lines = [line for text in texts for line in text.splitlines()][:20000]
        train(lines)
    texts = [text_of(entry) for entry in json.loads((GOLDEN / "texts.json").read_text())]
    for name, encode, decode in encoders():
        write_json(GOLDEN / f"{name}_ids.json", [golden(text, encode(text), decode) for text in texts])
    make_variants(texts)
    book = BOOK.read_bytes().decode()
    hashes = {}
    for name, encode, _ in encoders():
        ids = encode(book)
        hashes[name] = [len(ids), hash_ids(ids)]
    write_json(GOLDEN / "book_hashes.json", hashes)


if __name__ == "__main__":
    main()
