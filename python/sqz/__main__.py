"""Indexes without the tools: python -m sqz build|info|verify|calibrate|compress|report.

    python -m sqz build manual.md faq/ --model MODEL -o manual.sqz
    python -m sqz calibrate manual.sqz --model MODEL --prompts questions.txt

Options are those of sqz-index; `python -m sqz COMMAND --help` lists them. MODEL is whatever transformers loads: a
folder, or a name of the Hugging Face hub. Exit codes: 0 done, 1 the system failed, 2 wrong usage, 3 bad input.
"""

import argparse
import json
import os
import signal
import sys
from collections.abc import Sequence
from typing import Any

import sqz
from sqz import _builder, _library

BAD_INPUT = {2, 4, 5, 6, 8}  # sqz_status: not found, corrupt, unsupported, mismatch, numeric


def _load(options: argparse.Namespace) -> tuple[Any, Any]:
    """Model and tokenizer."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, logging

    if options.quiet:
        logging.disable_progress_bar()
    if os.path.isabs(options.model) or options.model.startswith(("./", "../")):
        os.stat(options.model)  # or transformers asks its hub for a model with this name
    device = options.device or ("cuda" if torch.cuda.is_available() else "cpu")
    names = {"f32": torch.float32, "bf16": torch.bfloat16}
    dtype = names[options.run_dtype or ("f32" if device == "cpu" else "bf16")]
    try:
        torch.empty(1, device=device)
    except (AssertionError, RuntimeError) as error:  # of torch without CUDA, or of a machine without a GPU
        raise ValueError(f"--device {device}: {error}") from None
    model = AutoModelForCausalLM.from_pretrained(options.model, dtype=dtype).to(device).eval()
    return model, AutoTokenizer.from_pretrained(options.model)


def _build(options: argparse.Namespace) -> dict[str, Any]:
    if os.path.exists(options.output) and not options.force:
        raise FileExistsError(f"{options.output}: file exists; pass --force to replace it")
    chat: Any = options.chat == "auto"
    if options.chat not in (None, "auto"):
        chat = _json(options.chat, _text(options.chat))
    for path in (*options.texts, *options.after):
        os.stat(path)  # before the model is loaded
    model, tokenizer = _load(options)
    names = ("levels", "rows", "max_tokens", "sink", "tail", "partition", "page_size", "level_fractions",
             "coarse_keep", "iterations", "layers16", "seed", "threads", "engine")
    built: sqz.Built = sqz.build(model, tokenizer, options.texts, options.output, overwrite=options.force, chat=chat,
                                 after=options.after, progress=False if options.quiet else None, **{name: getattr(options, name) for name in names})
    return dict(vars(built))


def _info(options: argparse.Namespace) -> dict[str, Any]:
    with sqz.Index(options.index) as index:
        fields = _builder.info(index)
    if not options.json:
        fields.pop("metadata")  # the same, as the file has it
    return fields


def _verify(options: argparse.Namespace) -> dict[str, Any]:
    with sqz.Index(options.index) as index:
        index.verify()
    return {"path": options.index, "ok": True}


def _calibrate(options: argparse.Namespace) -> dict[str, Any]:
    prompts = [prompt for file in options.prompts for prompt in _prompts(file)]
    os.stat(options.index)
    model, tokenizer = _load(options)
    return sqz.calibrate(options.index, model, tokenizer, prompts, answer_tokens=options.answer_tokens,
                         output=options.output, overwrite=options.force, progress=False if options.quiet else None)


def _prompts(path: str) -> list[str]:
    """One a line; in F.jsonl objects with "prompt"."""
    lines = [(f"{path}: line {number}", line.rstrip("\r")) for number, line in enumerate(_text(path).split("\n"), 1)]
    prompts = [_prompt(where, line) if path.endswith(".jsonl") else line for where, line in lines if line]
    if not prompts:
        raise ValueError(f"{path}: prompts: found none, expected at least one, one a line")
    return prompts


def _prompt(where: str, line: str) -> str:
    found = _json(where, line).get("prompt")
    if not isinstance(found, str):
        raise ValueError(f"{where}: prompt: found {found!r}, expected a text")
    return found


def _text(path: str) -> str:
    with open(path, "rb") as file:
        try:
            return file.read().decode()
        except UnicodeDecodeError as error:
            raise ValueError(f"{path}: text: not valid UTF-8 at byte {error.start}") from None


def _json(where: str, text: str) -> dict[str, Any]:
    try:
        found = json.loads(text)
    except ValueError as error:
        raise ValueError(f"{where}: found no JSON: {error}") from None
    if not isinstance(found, dict):
        raise ValueError(f"{where}: found {text[:40]!r}, expected a JSON object")
    return found


def _compress(options: argparse.Namespace) -> dict[str, Any]:
    with sqz.Index(options.index) as index:
        return _builder.compress(index, options.output, rows=options.rows, layers16=options.layers16,
                                 threads=options.threads, replace=options.force)


def _numbers(kind: Any) -> Any:
    def numbers(text: str) -> list[Any]:
        return [kind(part) for part in text.split(",")]

    return numbers  # argparse says "invalid numbers value"


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser("python -m sqz", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--version", action="version", version=f"sqz {sqz.__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")

    def command(name: str, run: Any, text: str) -> argparse.ArgumentParser:
        added = commands.add_parser(name, help=text, description=text)
        added.set_defaults(run=run)
        added.add_argument("--json", action="store_true", help="print the result as JSON")
        added.add_argument("-q", "--quiet", action="store_true", help="no progress bar")
        return added

    def model_options(added: argparse.ArgumentParser) -> None:
        added.add_argument("-m", "--model", required=True, help="folder or hub name of a model of transformers")
        added.add_argument("--device", help="cpu, cuda, cuda:1 (default: a GPU, if there is one)")
        added.add_argument("--run-dtype", choices=["f32", "bf16"], help="of the model (default: f32, on a GPU bf16)")

    def code_options(added: argparse.ArgumentParser, rows: list[str]) -> None:
        added.add_argument("--rows", choices=rows, help=f"how keys and values are stored ({rows[0]}); q8: codes of 8 bits")
        added.add_argument("--layers16", type=_numbers(int), help="layers whose rows stay in 16 bits: 0,1")
        added.add_argument("--threads", type=int, help="of the clustering (all cores)")
        added.add_argument("--force", action="store_true", help="replace an existing output")

    build = command("build", _build, "Build the index of a fixed context: text files and folders of them.")
    build.add_argument("--seed", type=int, help="of everything random (0)")
    build.add_argument("texts", nargs="+", metavar="TEXT", help="text files, or folders of them")
    model_options(build)
    build.add_argument("-o", "--output", required=True, help="the index to write")
    build.add_argument("--chat", metavar="F.json", help="put the texts into a turn of a chat: the texts around its turns, "
                       "or auto, those of the model's template")
    build.add_argument("--after", type=lambda text: text.split(","), default=(), metavar="A.sqz[,B.sqz]",
                       help="the texts continue these contexts, which are not computed again")
    build.add_argument("--max-tokens", type=int, help="use the first N tokens only")
    build.add_argument("--sink", type=int, help="first tokens that are always attended (16)")
    build.add_argument("--tail", type=int, help="last tokens that are always attended; they calibrate (100)")
    build.add_argument("--partition", choices=["kmeans", "pages"], help="clusters, or pages of consecutive tokens")
    build.add_argument("--page-size", type=int, help="tokens of a page (16)")
    build.add_argument("--levels", type=int, help="of the centroid tree (2)")
    build.add_argument("--level-fractions", type=_numbers(float), help="clusters a token, coarse to fine: 0.01,0.05")
    build.add_argument("--coarse-keep", type=float, help="fraction of keys that the coarse levels let through (0.5)")
    build.add_argument("--iterations", type=int, help="of k-means (10)")
    build.add_argument("--engine", choices=["auto", "faiss", "cuda"], help="of k-means: faiss is the CPU")
    code_options(build, ["bf16", "f16", "q8"])

    for name, run, text in (("info", _info, "Say what an index is: model, context, clusters, build parameters."),
                            ("verify", _verify, "Check every checksum and invariant of an index.")):
        command(name, run, text).add_argument("index", metavar="INDEX")

    calibrate = command("calibrate", _calibrate, "Calibrate an index anew with prompts like those it will be asked.")
    calibrate.add_argument("index", metavar="INDEX")
    model_options(calibrate)
    calibrate.add_argument("--prompts", nargs="+", required=True, metavar="F",
                           help='prompts, one a line; in F.jsonl objects with "prompt"')
    calibrate.add_argument("-o", "--output", help="where to write (default: in place)")
    calibrate.add_argument("--force", action="store_true", help="replace an existing output of -o")
    calibrate.add_argument("--answer-tokens", type=int, default=16, help="tokens of each answer that count (16)")

    compress = command("compress", _compress, "Store keys and values of an index in 8 bits.")
    compress.add_argument("index", metavar="INDEX")
    compress.add_argument("-o", "--output", required=True, help="the index to write")
    code_options(compress, ["q8"])
    commands.add_parser("report", help="draw results of sqz-eval and indexes: python -m sqz.report")
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    given = list(sys.argv[1:] if arguments is None else arguments)
    if given[:1] == ["report"]:
        from sqz.report import main as report

        return report(given[1:])
    options = _parser().parse_args(given)
    try:
        result = options.run(options)
    except KeyboardInterrupt:
        return _fail(options, "stopped: nothing was written", 130)
    except ImportError as error:
        return _fail(options, f"{error}: pip install '.[transformers]' in the checkout", 1)
    except _library.Error as error:
        return _fail(options, error, 3 if error.status in BAD_INPUT else 2 if error.status == 1 else 1)
    except (TypeError, ValueError, FileNotFoundError, KeyError) as error:
        return _fail(options, error, 3)
    except (OSError, MemoryError) as error:
        return _fail(options, error, 1)
    if options.json:
        print(json.dumps(result))
    else:
        width = max(map(len, result))
        for name, value in result.items():
            print(f"{name:{width}}  {value if isinstance(value, (str, int, float)) else json.dumps(value)}")
    return 0


def _fail(options: argparse.Namespace, message: object, code: int) -> int:
    print(f"python -m sqz {options.command}: {message}", file=sys.stderr)
    return code


if __name__ == "__main__":
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # of `| head`
    sys.exit(main())
