#!/usr/bin/env python3
"""Fills in tests/golden/tokenizer: the ids that Hugging Face `tokenizers` gives for the adversarial texts of texts.json,
and for 3,000 texts that are drawn from hostile.json, with the small tokenizers that stand there. A new text is a line of
texts.json; a new feature of tokenizer.json is a line of variants.json, whose cases this fills in.

Needs: pip install tokenizers xxhash
"""
import json
import pathlib
import struct

import tokenizers
import xxhash

ROOT = pathlib.Path(__file__).resolve().parent.parent
GOLDEN = ROOT / "tests/golden/tokenizer"
NANO = ROOT / "examples/models/nano/tokenizer.json"

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


def make_variants(texts):
    """The cases of variants.json: JSON patches of one tiny tokenizer, each showing one feature in its ids."""
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


def hostile_texts(seed, fragments):
    """Random texts, the same as in tests/formats/tokenizer_test.cc: of fragments and of any code points."""
    def below(bound):  # SplitMix64
        nonlocal seed
        seed = (seed + 0x9e3779b97f4a7c15) % 2**64
        z = (seed ^ seed >> 30) * 0xbf58476d1ce4e5b9 % 2**64
        z = (z ^ z >> 27) * 0x94d049bb133111eb % 2**64
        return (z ^ z >> 31) % bound

    for _ in range(3000):
        text = ""
        for _ in range(below(24)):
            if below(4) > 0:
                text += fragments[below(len(fragments))]
            else:
                code = below(0x110000)
                text += "a" if 0xd800 <= code < 0xe000 else chr(code)
        yield text


def make_hostile():
    """The hashes of hostile.json: of the ids of each 100 texts."""
    golden = json.loads((GOLDEN / "hostile.json").read_text())
    texts = list(hostile_texts(golden["seed"], golden["fragments"]))
    golden["hashes"] = {
        name: [hash_ids([i for text in texts[first:first + 100] for i in encode(text)])
               for first in range(0, len(texts), 100)]
        for name, encode, _ in encoders()}
    write_json(GOLDEN / "hostile.json", golden)


def main():
    texts = [text_of(entry) for entry in json.loads((GOLDEN / "texts.json").read_text())]
    for name, encode, decode in encoders():
        write_json(GOLDEN / f"{name}_ids.json", [golden(text, encode(text), decode) for text in texts])
    make_variants(texts)
    make_hostile()


if __name__ == "__main__":
    main()
