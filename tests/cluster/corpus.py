"""What the cluster tests share: a corpus of pieces of a novel, and the indexes that builds alone make of them."""
import json
import pathlib
import subprocess

ROOT = pathlib.Path(__file__).parents[2]
MODEL = ROOT / "examples" / "models" / "nano"


class Corpus:
    """`count` documents of `size` bytes in `folder`, corpus.jsonl beside them; indexes are to come to folder/out."""

    def __init__(self, folder: pathlib.Path, tools: str, count: int, size: int) -> None:
        self.folder, self.out, self.manifest = folder, folder / "out", folder / "corpus.jsonl"
        self.tool = pathlib.Path(tools).resolve() / "sqz-index"
        text = (ROOT / "examples" / "texts" / "dracula.txt").read_bytes()
        self.keys = [f"part{i % 3}/{i}" for i in range(count)]
        for i in range(count):
            (folder / f"{i}.txt").write_bytes(text[size * i:size * (i + 1)])
        self.manifest.write_text("".join(json.dumps({"key": key, "texts": [f"{i}.txt"]}) + "\n"
                                         for i, key in enumerate(self.keys)))

    def check(self) -> None:
        """Every index is there and has the bytes of a build alone."""
        found = sorted(str(path.relative_to(self.out)) for path in self.out.rglob("*.sqz"))
        assert found == sorted(f"{key}.sqz" for key in self.keys), found
        for i, key in enumerate(self.keys):
            alone = self.folder / "alone.sqz"
            subprocess.run([self.tool, "build", "--model", MODEL, self.folder / f"{i}.txt", "-o", alone, "--force",
                            "-q"], check=True, stdout=subprocess.DEVNULL)
            assert alone.read_bytes() == (self.out / f"{key}.sqz").read_bytes(), key
        print(f"{len(self.keys)} indexes, each as if built alone", flush=True)
