#!/usr/bin/env python3
"""Makes tests/golden/tokenizer: small tokenizers, adversarial texts, and the ids that Hugging Face
`tokenizers` and `sentencepiece` give for them.

Needs: pip install tokenizers sentencepiece==0.1.97 xxhash
(the version whose ids formats/ gives: later ones break ties of unigram models the other way)

    scripts/make_tokenizer_goldens.py                 ids of the stored tokenizers again
    scripts/make_tokenizer_goldens.py --train FILE... train the stored tokenizers anew first
    scripts/make_tokenizer_goldens.py --corpus DIR    also corpus_hashes.json, for every .txt below DIR
"""
import argparse
import json
import pathlib
import struct
import tempfile

import sentencepiece
import tokenizers
import xxhash
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors, trainers

ROOT = pathlib.Path(__file__).resolve().parent.parent
GOLDEN = ROOT / "tests/golden/tokenizer"
NANO = ROOT / "examples/models/nano/tokenizer.json"

LLAMA3 = (r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}|"
          r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+")
QWEN2 = LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}")

SPECIALS = "<|begin_of_text|> <|endoftext|> <|im_start|> <|im_end|> <s> </s> <unk>".split()

TEXTS = [
    "", " ", "  ", "\n", "\r\n", "\t", "a", "Hello, world!", "The quick brown fox jumps over 13 dogs.",
    "I'm sure they've said it's theirs; we'll see what'd happen, don't you?",
    "I'M SURE THEY'VE SAID IT'S; WE'LL SEE WHAT'D, DON'T 'Re 'vE 'Ll",
    "it'\u017f \u017ft '\u017ftill, \u212aelvin '\u212a and K",
    "1 12 123 1234 12345 1234567890 3.14159 1,000,000 0x1F 1e-10",
    "\u0661\u0662\u0663\u0664 \u00b2\u00b3\u00b9 \u00bd\u00be \u2160\u2161\u2162 \U0001d7d8\U0001d7d9 \u0be7\u0be8",
    "a  b   c    d     e      f       g        h                 i",
    "trailing spaces     ", "     leading spaces", "tabs\t\tand\t \tspaces \t mixed\t",
    "line one\nline two\n\nline four\n\n\n\nline eight\n", "crlf one\r\ncrlf two\r\n\r\n\r\nend\r\r\n\n\r",
    " \n \n  \n   x", "x \n y \r\n z \r w",
    "nel\u0085here mvs\u180ehere ls\u2028here ps\u2029here nbsp\u00a0here zwsp\u200bhere bom\ufeffhere",
    "\u0085\u0085 \u180e\u180e \u2028\u2028 \u2029 \u3000\u3000 \u00a0 \u1680 \u2003 \u202f \u205f x",
    "vertical\x0btab form\x0cfeed bell\x07 esc\x1b del\x7f",
    "NUL\x00inside\x00\x00here \x00", "\x00", "\x01\x02\x03\x1f",
    "caf\u00e9 cafe\u0301 na\u00efve nai\u0308ve \u00c5 A\u030a \u212b",
    "e\u0301\u0301\u0301 o\u0323\u0302 o\u0302\u0323 \u1ed9 q\u0307\u0323 q\u0323\u0307 \u1e9b\u0323",
    "\u0958 \u09dc \u2adc \ufb1d \u0344 \u1100\u1161\u11a8 \uac00\u11a8 \ud55c\uad6d\uc5b4 \u1112\u1161\u11ab",
    "\ufb01 \ufb03 \u2460 \u3392 \uff21\uff22\uff23 \u00aa\u00ba \u2126 \u037e \u0387 \u1fef \u0340\u0341",
    "\u4f60\u597d\uff0c\u4e16\u754c\u3002\u6211\u6709123\u4e2a\u82f9\u679c\uff01",
    "\u65e5\u672c\u8a9e\u306e\u30c6\u30ad\u30b9\u30c8\u3068\u30ab\u3099\u3068\u304c",
    "\U0002000b\U0002f800\u2f00\uf900 \U00031350\U0002ebf0x \U000105c0y",
    "\u0627\u0644\u0633\u0644\u0627\u0645 \u0639\u0644\u064a\u0643\u0645 \u0661\u0662\u0663 \u202babc\u202c",
    "\u05e9\u05b8\u05c1\u05dc\u05d5\u05b9\u05dd \u05e2\u05d5\u05dc\u05dd \u200f!\u200e",
    "\u0928\u092e\u0938\u094d\u0924\u0947 \u0926\u0941\u0928\u093f\u092f\u093e \u0e2a\u0e27\u0e31\u0e2a\u0e14\u0e35 \u1019\u103c\u1014\u103a\u1019\u102c",
    "\U0001f600\U0001f602 \U0001f468\u200d\U0001f469\u200d\U0001f467\u200d\U0001f466 \U0001f3f3\ufe0f\u200d\U0001f308 \U0001f1e9\U0001f1ea \U0001f44d\U0001f3fd \U0001fae8",
    "\u2764\ufe0f \u2764 \u0031\ufe0f\u20e3 \u00a9\u00ae\u2122",
    "z\u0351\u036b\u0343a\u0329\u032bl\u0358g\u0321o\u0353\u0321 t\u0337e\u0338x\u0334t\u0335",
    "\U00010348\U0001d518\U0001d52b\U0001d526 \U0010ffff \ufffd \ufffe \uffff \ue000",
    "\u200b\u200c\u200d\u2060\ufeff a\u200db a\u200cb \u00adsoft\u00adhyphen",
    "<|begin_of_text|>Hello<|end_of_text|>", "a<|endoftext|>b <|endoftext|> c", "<|im_start|>user\nHi<|im_end|>\n",
    "<|begin_of_text|><|begin_of_text|> <|begin_of_text|>", "<|begin_of_text", "<|im_start|><|im_end|><|im_sta",
    "<s>text</s> <s> </s><unk> <0x41> <0x0A>", " <s> x </s> \u2581\u2581y \u2581",
    "[WORD] [WORD]s x[WORD] [STRIP] [STRIP]  y  [LEFT] z [RIGHT]  w caf\u00e9 cafe\u0301 [NORM]\u00c5",
    "void f(int *p) { if (p != nullptr && *p >= 0) { return; } } // comment ==>\n\t#define X(a) (a##_t)\n",
    "def f(x):\n    return {\"k\": [1, 2, 3], 'v': x**2}\n\n\nclass A(B):\n        pass\n",
    "https://example.org/a/b?c=d&e=%20#frag user@example.com C:\\path\\to\\file.txt",
    "\u201cquotes\u201d \u2018single\u2019 it\u2019s \u2014 dash \u2013 en \u2026 \u00ab\u00bb",
    "!!!???...,,,;;; ((([[[{{{ }}}]]])))\n\n !\n ?\r\n$$$ %%% ^^^ &&& *** ~~~ ``` ||| \\\\\\",
    "mixed\u4f60\u597dABC\u0661def\U0001f600ghi\u00e9\u0301 \n\u05d0bc",
    "na\u0303o \u0130stanbul \u0131\u015f\u0131k STRA\u00dfE \u1e9e \u01c5 \u03a3\u03af\u03c3\u03c5\u03c6\u03bf\u03c2",
    "'s", "''s 's's ' s", "don''t", "x's", " 's", "9's 9th 9 th",
    {"repeat": "a", "count": 5000}, {"repeat": " ", "count": 5000}, {"repeat": "\n", "count": 3000},
    {"repeat": "ab", "count": 4000}, {"repeat": "7", "count": 1000}, {"repeat": "\u0301", "count": 1000},
    {"repeat": " \u0323\u0301", "count": 700}, {"repeat": "\U0001f600", "count": 900},
    {"repeat": "=-", "count": 2000}, {"repeat": "the ", "count": 1500}, {"repeat": "\t\r\n ", "count": 800},
]

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


def sentence_piece(path):
    model = sentencepiece.SentencePieceProcessor(model_file=str(path))
    # Versions of the library differ in how they give control pieces back; only the text
    # without them is compared.
    return (lambda text: [model.bos_id()] + model.encode(text),
            lambda ids, keep: model.decode([i for i in ids if not model.is_control(i)]))


def write_json(path, value):
    path.write_text(json.dumps(value, ensure_ascii=True, separators=(",", ":")) + "\n")


def encoders():
    yield "nano", *hugging_face(tokenizers.Tokenizer.from_file(str(NANO)))
    for name in ("qwen2", "gpt2", "ignore_merges", "llama2", "llama2_metaspace"):
        yield name, *hugging_face(tokenizers.Tokenizer.from_file(str(GOLDEN / f"{name}.json")))
    for name in ("spm_bpe", "spm_unigram", "spm_symbols"):
        yield name, *sentence_piece(GOLDEN / f"{name}.model")


def train_byte_level(files, pattern, vocab, specials, normalizer=None):
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.normalizer = normalizer
    if pattern is None:
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    else:
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence([
            pre_tokenizers.Split(tokenizers.Regex(pattern), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=False)
    trainer = trainers.BpeTrainer(vocab_size=vocab, special_tokens=[], show_progress=False,
                                  initial_alphabet=pre_tokenizers.ByteLevel.alphabet())
    tokenizer.train_from_iterator(files, trainer)
    tokenizer.add_special_tokens(specials)
    return json.loads(tokenizer.to_str())


def merges_as_strings(tokenizer):
    tokenizer["model"]["merges"] = [" ".join(merge) for merge in tokenizer["model"]["merges"]]


def train(texts):
    qwen2 = train_byte_level(texts, QWEN2, 1500, ["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
                             normalizers.NFC())
    write_json(GOLDEN / "qwen2.json", qwen2)

    gpt2 = train_byte_level(texts, None, 1000, ["<|endoftext|>"])
    merges_as_strings(gpt2)
    del gpt2["model"]["type"]  # as the file that GPT-2 came with
    write_json(GOLDEN / "gpt2.json", gpt2)

    ignore = train_byte_level(texts, LLAMA3, 1000, ["<|begin_of_text|>", "<|end_of_text|>"])
    ignore["model"]["ignore_merges"] = True
    # Tokens that no merge makes any more, so that only the whole-word look-up finds them.
    merges = ignore["model"]["merges"]
    made = {a + b for i, (a, b) in enumerate(merges) if i % 3}
    used = {part for a, b in merges for part in (a, b)}
    ignore["model"]["merges"] = [m for m in merges if m[0] + m[1] in made or m[0] + m[1] in used]
    begin = ignore["added_tokens"][0]
    ignore["post_processor"] = {"type": "Sequence", "processors": [
        ignore["post_processor"],
        {"type": "TemplateProcessing",
         "single": [{"SpecialToken": {"id": begin["content"], "type_id": 0}},
                    {"Sequence": {"id": "A", "type_id": 0}}],
         "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
         "special_tokens": {begin["content"]: {"id": begin["content"], "ids": [begin["id"]],
                                               "tokens": [begin["content"]]}}}]}
    write_json(GOLDEN / "ignore_merges.json", ignore)

    with tempfile.TemporaryDirectory() as directory:
        corpus = pathlib.Path(directory) / "corpus.txt"
        corpus.write_text("\n".join(texts))
        for kind in ("bpe", "unigram"):
            sentencepiece.SentencePieceTrainer.train(
                input=str(corpus), model_prefix=f"{directory}/{kind}", model_type=kind,
                vocab_size=1200 if kind == "bpe" else 800, byte_fallback=True, split_digits=True,
                normalization_rule_name="identity" if kind == "bpe" else "nmt_nfkc",
                remove_extra_whitespaces=kind != "bpe", allow_whitespace_only_pieces=True,
                character_coverage=0.9995, max_sentence_length=100000, minloglevel=2)
            model = pathlib.Path(f"{directory}/{kind}.model")
            (GOLDEN / f"spm_{kind}.model").write_bytes(model.read_bytes())
        # Rules of its own, no bytes, symbols that merges must not touch, and many unknown characters.
        rules = pathlib.Path(directory) / "rules.tsv"
        rules.write_text("FF21\tA\n41\t61\nFB01\t66 69\n2160 2160\t32\n09\t20\nA0\t20\n"
                         "65 301\tE9\nAD\t\n")
        sentencepiece.SentencePieceTrainer.train(
            input=str(corpus), model_prefix=f"{directory}/symbols", model_type="bpe",
            vocab_size=600, normalization_rule_tsv=str(rules), character_coverage=0.99,
            user_defined_symbols=["<|im_start|>", "<|im_", "the", "he", "''", "\u2581\u2581", "7"],
            max_sentence_length=100000, minloglevel=2)
        (GOLDEN / "spm_symbols.model").write_bytes(
            pathlib.Path(f"{directory}/symbols.model").read_bytes())
    convert_llama2()


def convert_llama2():
    """tokenizer.json from spm_bpe.model, in the two shapes that conversion has had."""
    model = sentencepiece.SentencePieceProcessor(model_file=str(GOLDEN / "spm_bpe.model"))
    pieces = [model.id_to_piece(i) for i in range(model.get_piece_size())]
    vocab = {piece: i for i, piece in enumerate(pieces)}
    # As transformers does: every way to make a piece of two pieces, best pieces first, then the
    # earlier left and right parts first.
    merges = []
    for piece in pieces:
        local = [(piece[:i], piece[i:]) for i in range(1, len(piece))
                 if piece[:i] in vocab and piece[i:] in vocab]
        local.sort(key=lambda pair: (vocab[pair[0]], vocab[pair[1]]))
        merges += [(vocab[piece], pair) for pair in local]
    merges.sort(key=lambda merge: -model.get_score(merge[0]))
    special = [{"id": i, "content": pieces[i], "single_word": False, "lstrip": False, "rstrip": False,
                "normalized": False, "special": True} for i in range(3)]
    template = {"type": "TemplateProcessing",
                "single": [{"SpecialToken": {"id": "<s>", "type_id": 0}},
                           {"Sequence": {"id": "A", "type_id": 0}}],
                "pair": [{"SpecialToken": {"id": "<s>", "type_id": 0}},
                         {"Sequence": {"id": "A", "type_id": 0}},
                         {"SpecialToken": {"id": "<s>", "type_id": 1}},
                         {"Sequence": {"id": "B", "type_id": 1}}],
                "special_tokens": {"<s>": {"id": "<s>", "ids": [1], "tokens": ["<s>"]}}}
    tokenizer = {
        "version": "1.0", "truncation": None, "padding": None, "added_tokens": special,
        "normalizer": {"type": "Sequence", "normalizers": [
            {"type": "Prepend", "prepend": "\u2581"},
            {"type": "Replace", "pattern": {"String": " "}, "content": "\u2581"}]},
        "pre_tokenizer": None, "post_processor": template,
        "decoder": {"type": "Sequence", "decoders": [
            {"type": "Replace", "pattern": {"String": "\u2581"}, "content": " "},
            {"type": "ByteFallback"}, {"type": "Fuse"},
            {"type": "Strip", "content": " ", "start": 1, "stop": 0}]},
        "model": {"type": "BPE", "dropout": None, "unk_token": "<unk>",
                  "continuing_subword_prefix": None, "end_of_word_suffix": None, "fuse_unk": True,
                  "byte_fallback": True, "ignore_merges": False, "vocab": vocab,
                  "merges": [f"{a} {b}" for _, (a, b) in merges]}}
    write_json(GOLDEN / "llama2.json", tokenizer)
    tokenizer["normalizer"] = None
    tokenizer["pre_tokenizer"] = {"type": "Metaspace", "replacement": "\u2581",
                                  "prepend_scheme": "first", "split": False}
    tokenizer["model"]["merges"] = [list(pair) for _, pair in merges]
    write_json(GOLDEN / "llama2_metaspace.json", tokenizer)


def split(pattern, behavior="Isolated", invert=False):
    return {"type": "Split", "pattern": pattern, "behavior": behavior, "invert": invert}


def token(i, content, **flags):
    return {"id": i, "content": content, "single_word": False, "lstrip": False, "rstrip": False,
            "normalized": False, "special": False} | flags


def variants():
    """JSON merge patches of one tiny tokenizer, each showing one feature in its ids.

    The model knows a few letters and joins unknown characters of one word, so that ids show where
    words end."""
    yield "plain", {}
    for behavior in ("Isolated", "Removed", "MergedWithPrevious", "MergedWithNext", "Contiguous"):
        for invert in (False, True):
            yield (f"split_{behavior}_{invert}",
                   {"pre_tokenizer": split({"Regex": r"[\s\p{P}]"}, behavior, invert)})
    yield "split_string", {"pre_tokenizer": split({"String": "e."}, "MergedWithPrevious")}
    yield "split_space", {"pre_tokenizer": split({"String": " "}, "Removed")}
    yield "empty_matches", {"pre_tokenizer": split({"Regex": r"\p{N}*"})}
    yield "not_space", {"pre_tokenizer": split({"Regex": r"[\S]+|\S"})}
    yield "words", {"pre_tokenizer": split({"Regex": r"\w+|[^\w\s]+"}, "Removed", True)}
    yield "lines", {"pre_tokenizer": split({"Regex": r"^.+$"})}
    yield "kelvin", {"pre_tokenizer": split({"Regex": r"(?i:k|s)"})}
    yield "llama3_split", {"pre_tokenizer": split({"Regex": LLAMA3})}
    yield "qwen2_split", {"pre_tokenizer": split({"Regex": QWEN2})}
    yield "digits", {"pre_tokenizer": {"type": "Digits", "individual_digits": False}}
    yield "digits_single", {"pre_tokenizer": {"type": "Digits", "individual_digits": True}}
    yield "prefix_space", {"pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": True,
                                             "trim_offsets": True, "use_regex": True}}
    yield "digits_then_bytes", {"pre_tokenizer": {"type": "Sequence", "pretokenizers": [
        {"type": "Digits", "individual_digits": True},
        {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": False}]}}
    for scheme in ("always", "first", "never"):
        space = {"type": "Metaspace", "replacement": "\u2581", "prepend_scheme": scheme, "split": True}
        yield f"metaspace_{scheme}", {"pre_tokenizer": space, "decoder": space}
    for form in ("NFC", "NFD", "NFKC", "NFKD"):
        yield form, {"normalizer": {"type": form}, "pre_tokenizer": split({"Regex": r"."})}
    yield "replace_regex", {"normalizer": {"type": "Sequence", "normalizers": [
        {"type": "Replace", "pattern": {"Regex": r"\s+"}, "content": " "},
        {"type": "Prepend", "prepend": "a"}]}}
    yield "unknowns_apart", {"model": {"fuse_unk": False}}
    yield "no_unknown", {"model": {"unk_token": None, "fuse_unk": False}}
    yield "bytes_before_unknown", {"model": {"byte_fallback": True}}
    yield "suffix", {"post_processor": {
        "type": "TemplateProcessing",
        "single": [{"SpecialToken": {"id": "B", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}},
                   {"SpecialToken": {"id": "E", "type_id": 0}}],
        "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
        "special_tokens": {"B": {"id": "B", "ids": [1, 2], "tokens": ["a", "b"]},
                           "E": {"id": "E", "ids": [3], "tokens": ["c"]}}}}
    first = len(variants_base()["model"]["vocab"])  # `tokenizers` numbers on, whatever the file says
    flags = [("[WORD]", {"single_word": True}), ("[STRIP]", {"lstrip": True, "rstrip": True}),
             ("[LEFT]", {"lstrip": True, "special": True}), ("[RIGHT]", {"rstrip": True}),
             ("caf\u00e9", {"normalized": True}), ("<|im_start|>", {"special": True}),
             ("<|im_", {}), ("A\u030a", {"normalized": True}), ("'s", {"single_word": True})]
    added = [token(first + i, content, **flag) for i, (content, flag) in enumerate(flags)]
    yield "added", {"added_tokens": added}
    yield "added_nfc", {"added_tokens": added, "normalizer": {"type": "NFC"}}
    yield "added_prepend", {"added_tokens": added, "normalizer": {"type": "Prepend", "prepend": "z"},
                            "pre_tokenizer": {"type": "Metaspace", "replacement": "\u2581",
                                              "prepend_scheme": "first", "split": True}}


def variants_base():
    vocab = {"<unk>": 0, "a": 1, "b": 2, "c": 3, "\u2581": 4, "e": 5, "\u0301": 6, "\u00e9": 7,
             "t": 8, "h": 9, "th": 10, "the": 11, "\u2581the": 12, "ab": 13, "aba": 14, "abab": 15,
             "\u0120": 16, "\u0120a": 17, "o": 18, "<0xC3>": 19, "<0xA9>": 20, "<0x20>": 21, " ": 22}
    merges = [["t", "h"], ["th", "e"], ["\u2581", "the"], ["a", "b"], ["ab", "a"], ["ab", "ab"],
              ["\u0120", "a"]]
    return {"version": "1.0", "truncation": None, "padding": None, "added_tokens": [],
            "normalizer": None, "pre_tokenizer": None, "post_processor": None,
            "decoder": {"type": "Fuse"},
            "model": {"type": "BPE", "dropout": None, "unk_token": "<unk>",
                      "continuing_subword_prefix": None, "end_of_word_suffix": None,
                      "fuse_unk": True, "byte_fallback": False, "ignore_merges": False,
                      "vocab": vocab, "merges": merges}}


def merge_patch(target, patch):
    """RFC 7396, but null stays null: `tokenizers` wants to see the field."""
    if not isinstance(patch, dict) or "type" in patch:
        return patch
    out = dict(target)
    for key, value in patch.items():
        out[key] = merge_patch(target.get(key) or {}, value) if isinstance(value, dict) else value
    return out


def make_variants():
    base = variants_base()
    out = []
    for name, patch in variants():
        merged = merge_patch(base, patch)
        encode, decode = hugging_face(tokenizers.Tokenizer.from_str(json.dumps(merged)))
        cases = []
        for entry in TEXTS:
            text = text_of(entry)
            ids = encode(text)
            # A lossy model: what decoding gives is stored as a hash of both forms.
            decoded = "\0".join(decode(ids, keep) for keep in (False, True)).encode()
            cases.append([len(ids), hash_ids(ids), xxhash.xxh3_64(decoded).hexdigest()])
        out.append({"name": name, "patch": patch, "cases": cases})
    write_json(GOLDEN / "variants.json", {"base": base, "variants": out})


def main():
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--train", nargs="+", type=pathlib.Path, metavar="FILE")
    parser.add_argument("--corpus", type=pathlib.Path, metavar="DIR")
    arguments = parser.parse_args()
    GOLDEN.mkdir(parents=True, exist_ok=True)
    if arguments.train:
        texts = [file.read_bytes().decode() for file in arguments.train]
        lines = [line for text in texts for line in text.splitlines()][:20000]
        train(lines)
    write_json(GOLDEN / "texts.json", TEXTS)
    for name, encode, decode in encoders():
        cases = []
        for entry in TEXTS:
            text = text_of(entry)
            cases.append(golden(text, encode(text), decode))
        write_json(GOLDEN / f"{name}_ids.json", cases)
    make_variants()
    if arguments.corpus:
        hashes = {}
        files = sorted(arguments.corpus.rglob("*.txt"))
        texts = [file.read_bytes().decode() for file in files]
        for name, encode, _ in encoders():
            hashes[name] = {}
            for file, text in zip(files, texts):
                ids = encode(text)
                hashes[name][str(file.relative_to(arguments.corpus))] = [len(ids), hash_ids(ids)]
        write_json(GOLDEN / "corpus_hashes.json", hashes)


if __name__ == "__main__":
    main()
