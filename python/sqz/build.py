"""sqz.build() and sqz.calibrate(): from texts and a model of transformers to an index."""

import contextlib
import os
import pathlib
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

Path = str | os.PathLike[str]
Progress = bool | Callable[[float], object] | None


@dataclass(frozen=True)
class Built(os.PathLike[str]):
    """A finished index; a path wherever one is taken."""

    path: str
    tokens: int
    clusters: list[int]  # a KV head, coarse to fine
    bytes: int
    model_fingerprint: str
    seconds: dict[str, float] = field(repr=False)  # cluster, calibrate, write

    def __fspath__(self) -> str:
        return self.path


def build(model: Any, tokenizer: Any, texts: Path | Sequence[Path] | Any, output: Path, *, levels: int | None = None,
          rows: str | None = None, chat: bool | dict[str, Any] = False,
          max_tokens: int | None = None, after: Path | Sequence[Path] = (), overwrite: bool = False,
          progress: Progress = None, **options: Any) -> Built:
    """Builds the index of a fixed context: runs the model once over it, on its own device.

        sqz.build(model, tokenizer, ["manual.md", "faq/"], "manual.sqz")

    model: any model that sqz.transformers.capture takes, in evaluation mode. tokenizer: its own.
    texts: text files, and folders of them, which are one context: encoded file by file, with the tokenizer's special
    tokens in front. Or token ids, a tensor, array or list; then tokenizer may be None.
    chat: the texts stand in a turn of the tokenizer's chat template (True), or of sqz.chat.chat_format()'s result;
    the index keeps the texts around the turns.
    after: indexes of the same model that the texts continue, one behind the other. Their tokens are not computed again:
    the pass attends to all of their keys. The new index serves behind these alone, as if all were one text.
    output: the index to write. It appears when it is whole: nothing is there after an error or Ctrl-C.
    levels (2) of the tree of clusters; rows "bf16", "f16" or "q8"; max_tokens: the first ones alone;
    options: sink, tail, partition, page_size, level_fractions, coarse_keep, iterations, layers16,
    seed, threads, engine, as `sqz-index build` has them (sqz_build.h).
    progress: a bar on a terminal (None), a bar or none (True, False), or a function that gets 0 to 1.

    sqz.Error, TypeError, ValueError or OSError: the sentence says what to do. MemoryError: the pass needs more memory.
    """
    import torch

    import sqz
    from sqz._builder import Build
    from sqz.transformers import FixedContext
    from sqz.transformers.fingerprint import describe
    from sqz.transformers.layers import look
    from sqz.transformers.record import context_tokens, record

    path = os.fspath(output)
    if not overwrite and os.path.exists(path):
        raise FileExistsError(f"{path} exists: pass overwrite=True to replace it")
    layers = look(model)  # a model that cannot be served is refused before anything is read
    description = describe(model, layers)
    if chat is True:
        from sqz.chat import chat_format
        chat = chat_format(tokenizer)
    elif chat:
        _check_chat(chat)
    given, before = _listed(texts), _listed(after)
    _check_output(path, model, given, before)
    ids, digest = _context(model, tokenizer, given, max_tokens, chat or None, not before)
    tokens = context_tokens(ids, description, model.config)
    device = model.device
    gpu = (device.index or 0) if device.type == "cuda" else 0
    with contextlib.ExitStack() as stack:
        show, attention = stack.enter_context(_shown("build", progress)), None
        front = [stack.enter_context(sqz.Index(one)) for one in before]
        made = stack.enter_context(Build(
            path, description, tokens, levels=levels, rows=rows, tokenizer_hash=digest,
            chat=chat or None, gpu=gpu, replace=overwrite, after=[one.info.context_id for one in front] or None,
            state=layers.states if any(layers.states) else None, **options))
        if front:  # RoPE is about differences: the new tokens begin with 0, and what is in front stands before that
            behind = FixedContext(model, front, tokenizer=tokenizer, selector="dense", _from_zero=True)
            attention = stack.enter_context(behind)._attend
        stays = made.plan["takes_gpu"]

        def take(layer: int, keys: torch.Tensor, values: torch.Tensor, queries: torch.Tensor | None) -> None:
            if stays and keys.device == values.device == torch.device("cuda", gpu):
                keys, values = keys.contiguous(), values.contiguous()
                torch.cuda.synchronize(keys.device)
                if torch.cuda.mem_get_info(keys.device)[0] < made.plan["gpu_memory"]:
                    torch.cuda.empty_cache()  # torch keeps what the pass has freed
            else:
                keys, values = keys.cpu().contiguous(), values.cpu().contiguous()
            made.add_layer(keys, values, None if queries is None else queries.cpu().contiguous(),
                           lambda done: show((layer + done) / description["layers"]))

        try:
            for layer, state in enumerate(record(model, layers, tokens, made.plan["tail"], take, attention)):
                made.add_state(layer, {name: tensor.cpu().contiguous() for name, tensor in state.items()})
        except RuntimeError as error:
            if not isinstance(error, torch.OutOfMemoryError) and "DefaultCPUAllocator" not in str(error):
                raise
            raise MemoryError(f"{device} has no memory for a pass over {len(tokens)} tokens: give less text, or load "
                              "the model with dtype=torch.bfloat16") from None
        result = made.finish()
    return Built(path, result["tokens"], result["clusters"], result["bytes"], result["fingerprint"], result["seconds"])


def calibrate(index: Path, model: Any, tokenizer: Any, prompts: Sequence[str], *, answer_tokens: int = 16,
              output: Path | None = None, overwrite: bool = False, progress: Progress = None) -> dict[str, Any]:
    """Calibrates an index anew with prompts like those that it will be asked, so that it delivers the asked budget.

    The model answers each prompt with `answer_tokens` tokens, greedily and over all keys of the context; the queries
    of prompts and answers calibrate. A dozen prompts are enough. The index is replaced when the new one is whole;
    `output` writes another file instead. Returns {"path", "bytes", "queries", "source"}.
    """
    import torch

    import sqz
    from sqz import _builder
    from sqz.transformers import FixedContext

    path = os.fspath(index)
    target = path if output is None else os.fspath(output)
    if isinstance(prompts, str) or not prompts or not all(prompts):
        raise ValueError(f"prompts: found {prompts!r}, expected a list of texts, none of them empty")
    if target != path and not overwrite and os.path.exists(target):
        raise FileExistsError(f"{target} exists: pass overwrite=True to replace it")
    _check_output(target, model)
    with sqz.Index(path) as opened, _shown("calibrate", progress) as show:
        stored = _builder.info(opened)
        chat = stored["chat"]
        calls: list[int] = []
        queries: list[list[torch.Tensor]] = [[] for _ in stored["layers"]]
        lengths = []
        with FixedContext(model, opened, tokenizer=tokenizer, selector="dense") as context:
            first = next(number for number, layer in enumerate(opened.layers) if layer.query_heads)
            serve = context._serving.add

            def add(rows: torch.Tensor, own: torch.Tensor, own_lse: torch.Tensor, layer: int, plan: Any) -> None:
                if layer == first:
                    calls.append(len(rows))
                if not stored["layers"][layer]["dense"]:
                    queries[layer].append(rows.float().cpu())
                serve(rows, own, own_lse, layer, plan)

            vars(context._serving)["add"] = add
            with torch.inference_mode():
                for number, prompt in enumerate(prompts):
                    turn = _turn(tokenizer, chat, "between", prompt, chat["after"]) if chat else prompt
                    ids = tokenizer(turn, add_special_tokens=False, return_tensors="pt")["input_ids"]
                    lengths.append(ids.shape[1])
                    model.generate(ids.to(model.device), attention_mask=torch.ones_like(ids).to(model.device),
                                   do_sample=False, num_beams=1, max_new_tokens=answer_tokens + 1, disable_compile=True,
                                   pad_token_id=0)
                    show(0.8 * (number + 1) / len(prompts))
        source = (f"prompts: {len(prompts)} prompts, {sum(lengths)} tokens, and {sum(calls) - sum(lengths)} tokens of "
                  "answers")
        return _builder.recalibrate(opened, calls, [torch.cat(layer) if layer else None for layer in queries], target,
                                    lambda done: show(0.8 + 0.2 * done), source=source,
                                    replace=overwrite or target == path)


@contextlib.contextmanager
def _shown(label: str, progress: Progress) -> Any:
    """A function that shows how far the work is, 0 to 1: on stderr, as the caller asked."""
    if callable(progress):
        yield progress
        return
    try:
        from tqdm.auto import tqdm
    except ImportError:
        yield lambda done: None
        return
    with tqdm(total=100, desc=label, file=sys.stderr, disable=None if progress is None else not progress,
              bar_format="{desc} {percentage:3.0f} % |{bar}| {elapsed}, {remaining} left") as bar:
        yield lambda done: bar.update(100 * done - bar.n)


def _context(model: Any, tokenizer: Any, texts: Any, max_tokens: int | None,
             chat: dict[str, Any] | None, begins: bool) -> tuple[Any, str]:
    """Token ids, and the hash of the tokenizer that made them ("" if they were given). begins: nothing is in front."""
    if max_tokens is not None and max_tokens < 1:
        raise ValueError(f"max_tokens: found {max_tokens}, expected 1 or more")
    if not isinstance(texts, (list, tuple)) or not all(isinstance(one, (str, os.PathLike)) for one in texts):
        if chat:
            raise ValueError("chat: found it beside token ids, which are taken as they are: pass texts")
        ids = getattr(texts, "input_ids", texts)
        digest = "" if tokenizer is None else _hash(model, tokenizer)
        if max_tokens is None:
            return ids, digest
        return ids[..., :max_tokens] if hasattr(ids, "shape") else ids[:max_tokens], digest
    if not texts:
        raise ValueError("texts: found none, expected text files, folders of them, or token ids")
    if tokenizer is None:
        raise TypeError("tokenizer: found None, expected the model's own, which encodes the texts")
    digest, parts = _hash(model, tokenizer), list[str]()
    for path in find_documents(texts):
        try:
            parts.append(path.read_bytes().decode())
        except UnicodeDecodeError as error:
            raise ValueError(f"{path}: text: not valid UTF-8 at byte {error.start}") from None
    if not any(parts):
        raise ValueError(f"{texts[0]}: text: found nothing, expected some text")
    if chat:
        whole = _turn(tokenizer, chat, "before", "".join(parts), "")
        return tokenizer(whole, add_special_tokens=False, verbose=False)["input_ids"][:max_tokens], digest
    encoded: list[int] = []
    for text in parts:
        encoded += tokenizer(text, add_special_tokens=begins and not encoded, verbose=False)["input_ids"]
        if max_tokens is not None and len(encoded) >= max_tokens:
            break
    return encoded[:max_tokens], digest


def _listed(paths: Any) -> Any:
    """Makes a list of one path."""
    return [paths] if isinstance(paths, (str, os.PathLike)) else paths


def _check_output(path: str, model: Any, texts: Any = (), after: Sequence[Path] = ()) -> None:
    """Refuses an output that would replace a text, a file of the model or an index in front."""
    named = texts if isinstance(texts, (list, tuple)) else ()  # not token ids
    inputs = [one for one in (*named, *after) if isinstance(one, (str, os.PathLike))]
    folder = str(getattr(model, "name_or_path", ""))
    if os.path.isdir(folder) and not path.endswith(".sqz"):
        inputs += [os.path.join(folder, name) for name in os.listdir(folder)]
    if os.path.isfile(path) and any(os.path.exists(one) and os.path.samefile(path, one) for one in inputs):
        raise ValueError(f"output: found {path}, which is an input, too, expected another file")


def _check_chat(chat: Any) -> None:
    """Raises TypeError or ValueError unless it is as chat_format() writes it; trim and end may be left out."""
    if not isinstance(chat, dict):
        raise TypeError(f"chat: found {chat!r}, expected True, or a dictionary of sqz.chat.chat_format()")
    if missing := {"before", "between", "after"} - chat.keys():
        raise ValueError(f"chat: found no {sorted(missing)[0]}, expected before, between and after, the texts around "
                         "the turns: python -m sqz.chat writes them")
    for name in ("before", "between", "after"):
        if not isinstance(chat[name], str):
            raise ValueError(f"chat: {name}: found {chat[name]!r}, expected a text")
    if not isinstance(trim := chat.get("trim", False), bool):
        raise ValueError(f"chat: trim: found {trim!r}, expected true or false")
    if not isinstance(end := chat.get("end", []), list) or not all(one and isinstance(one, str) for one in end):
        raise ValueError(f"chat: end: found {end!r}, expected an array of tokens, each a string")


def _turn(tokenizer: Any, chat: dict[str, Any], before: str, text: str, after: str) -> str:
    """A turn of a chat. Its special tokens are the chat's: ValueError for a text that has some."""
    for token in {*tokenizer.all_special_tokens, *tokenizer.get_added_vocab()}:
        if token in text:
            raise ValueError(f"text: found the special token {token}, expected none in a turn of a chat")
    return str(chat[before]) + (text.strip() if chat.get("trim") else text) + after


def _hash(model: Any, tokenizer: Any) -> str:
    """ValueError for the tokenizer of another model."""
    from sqz.transformers.fingerprint import tokenizer_hash

    try:
        digest = tokenizer_hash(tokenizer)
    except FileNotFoundError:
        raise FileNotFoundError(f"tokenizer: no tokenizer.json was found for {tokenizer.name_or_path!r}: encode the "
                                "texts with it, and pass the ids and tokenizer=None") from None
    try:
        own = tokenizer_hash(model) if model.name_or_path else digest  # what lies beside the model
    except FileNotFoundError:
        own = digest
    if own != digest:
        raise ValueError(f"tokenizer: found that of {tokenizer.name_or_path}, expected that of {model.name_or_path}, "
                         f"the model's: AutoTokenizer.from_pretrained({model.name_or_path!r}) loads it")
    return digest


def find_documents(texts: Sequence[Path]) -> list[pathlib.Path]:
    """The text files that are named or are in named folders, in the order of sqz-index; binary files of folders out."""
    out: list[pathlib.Path] = []
    for given in map(pathlib.Path, texts):
        if not given.is_dir():
            if _is_binary(given):
                raise ValueError(f"{given}: found a zero byte, expected UTF-8 text")
            out.append(given)
            continue
        inside = sorted(path for path in given.rglob("*") if path.is_file() and not any(
            part.startswith(".") for part in path.relative_to(given).parts))
        texts_inside = [path for path in inside if not _is_binary(path)]
        for path in sorted(set(inside) - set(texts_inside)):
            print(f"{path}: not a text file (a zero byte), left out", file=sys.stderr)
        if not texts_inside:
            raise ValueError(f"{given}: folder: found no text file, expected at least one file of UTF-8 text")
        out += texts_inside
    return out


def _is_binary(path: pathlib.Path) -> bool:
    with open(path, "rb") as file:
        return b"\0" in file.read(64 << 10)
